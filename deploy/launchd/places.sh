# Where things are, for the scripts beside it, which set `daemon` first.
DESTDIR=${DESTDIR:-}
if [ -n "$daemon" ]; then
    kind=daemon
    domain=system
    support="/Library/Application Support/kvq-worker"
    logs=/Library/Logs/kvq
    plists=/Library/LaunchDaemons
else
    kind=agent
    domain=gui/$(id -u)
    support="$HOME/Library/Application Support/kvq-worker"
    logs=$HOME/Library/Logs/kvq
    plists=$HOME/Library/LaunchAgents
fi
plist=$DESTDIR$plists/kvq.worker.plist

# Stops what launchd runs as $1 and waits for its end: a worker ends its chunk first, and launchd
# starts no other before that.
boot_out() {
    launchctl bootout "$1" 2>/dev/null || true
    waited=0
    while launchctl print "$1" >/dev/null 2>&1; do
        [ "$waited" -lt 200 ] || { echo "$1 does not end" >&2; exit 1; }
        sleep 1
        waited=$((waited + 1))
    done
}
