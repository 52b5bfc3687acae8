#!/bin/sh
# Installs kvq's worker on a Mac, or brings an installed one up to date. Run it as often as you like.
#
#   install.sh [--venv DIR] [--env FILE]                       while you are logged in
#   sudo install.sh --daemon --user NAME [--venv DIR] [--env FILE]      from boot on
#
#   --venv DIR    where `kvq[worker]` is installed; its bin/ has kvq  [the kvq on PATH]
#   --env FILE    settings to take over; else those that are there stay, or an example is put there
set -eu

usage() {
    sed -n '2,/^set -eu$/s/^# \{0,1\}//p' "$0"
    exit 2
}

die() {
    echo "install: $*" >&2
    exit 1
}

here=$(cd "$(dirname "$0")" && pwd)
daemon= user= venv= env_file=
while [ $# -gt 0 ]; do
    case "$1" in
    --daemon) daemon=yes ;;
    --user) [ $# -ge 2 ] || usage; user=$2; shift ;;
    --venv) [ $# -ge 2 ] || usage; venv=$2; shift ;;
    --env) [ $# -ge 2 ] || usage; env_file=$2; shift ;;
    *) usage ;;
    esac
    shift
done

# With DESTDIR everything goes below that folder, by whomever, to look at it or to pack it.
. "$here/places.sh"
if [ -n "$daemon" ]; then
    [ -n "$user" ] || die "--daemon needs --user NAME, who owns the store's files; not root"
    [ "$user" != root ] || die "a worker does not run as root"
    id "$user" >/dev/null 2>&1 || die "there is no user $user"
    [ "$(id -u)" = 0 ] || [ -n "$DESTDIR" ] || die "--daemon needs root: sudo $0 ..."
else
    [ -z "$user" ] || die "--user goes with --daemon"
    [ "$(id -u)" != 0 ] || [ -n "$DESTDIR" ] || die "without --daemon, run it as yourself"
fi

if [ -z "$venv" ]; then
    found=$(command -v kvq) || die "no kvq on PATH: name its environment with --venv"
    venv=$(cd "$(dirname "$found")/.." && pwd)
fi
[ -x "$venv/bin/kvq" ] || die "there is no $venv/bin/kvq: pip install 'kvq[worker]'"
[ -z "$env_file" ] || [ -r "$env_file" ] || die "$env_file cannot be read"

# For sed, and for XML.
escaped() {
    printf %s "$1" | sed -e 's/&/\&amp;/g; s/</\&lt;/g; s/>/\&gt;/g' -e 's/[\\&|]/\\&/g'
}

filled() {
    sed -e "s|@SUPPORT@|$(escaped "$support")|g" -e "s|@VENV@|$(escaped "$venv")|g" \
        -e "s|@LOGS@|$(escaped "$logs")|g" -e "s|@USER@|$(escaped "$user")|g" "$1"
}

# Replaces a file in one step, so that launchd never reads half of one.
put() {
    target=$1 mode=$2
    cat >"$target.new"
    chmod "$mode" "$target.new"
    mv "$target.new" "$target"
}

mkdir -p "$DESTDIR$support" "$DESTDIR$logs" "$DESTDIR$plists"
chmod 700 "$DESTDIR$support" "$DESTDIR$logs"
put "$DESTDIR$support/kvq-worker.sh" 755 <"$here/kvq-worker.sh"
settings=$DESTDIR$support/worker.env
example=
if [ -n "$env_file" ]; then
    put "$settings" 600 <"$env_file"
elif [ ! -e "$settings" ]; then
    put "$settings" 600 <"$here/worker.env"
    example=yes
fi
filled "$here/kvq.worker.$kind.plist" | put "$plist" 644
if command -v plutil >/dev/null; then
    plutil -lint -s "$plist" || die "$plist is not a property list"
fi
if [ -n "$daemon" ]; then
    chown -R "$user" "$DESTDIR$support" "$DESTDIR$logs" || [ -n "$DESTDIR" ]
    chown 0:0 "$plist" || [ -n "$DESTDIR" ]
    mkdir -p "$DESTDIR/etc/newsyslog.d"
    filled "$here/newsyslog.conf" | put "$DESTDIR/etc/newsyslog.d/kvq.conf" 644
else
    filled "$here/newsyslog.conf" | put "$DESTDIR$support/newsyslog.conf" 644
fi

if [ -n "$example" ]; then
    echo "now write your settings into $settings, then run this again"
    exit 0
fi
boot_out "$domain/kvq.worker"
launchctl enable "$domain/kvq.worker"
launchctl bootstrap "$domain" "$plist"
echo "the worker runs, and starts again by itself. Its log: $logs/worker.log"
if [ -z "$daemon" ]; then
    echo "to have the log rotated:  sudo cp '$support/newsyslog.conf' /etc/newsyslog.d/kvq.conf"
fi
