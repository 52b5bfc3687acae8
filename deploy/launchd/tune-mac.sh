#!/bin/sh
# Settings of a Mac that works unattended. Needs root. Run it as often as you like.
#
#   sudo tune-mac.sh [--wired-limit-mb N]     no sleep, start after a power cut
#   sudo tune-mac.sh --undo                   macOS's own limit again; pmset's settings stay
#
# N is how much memory (MiB) the GPU may hold, now and after each boot. macOS allows about three
# quarters of all; leave it at least 8 GiB for itself.
set -eu

usage() {
    sed -n '2,/^set -eu$/s/^# \{0,1\}//p' "$0"
    exit 2
}

here=$(cd "$(dirname "$0")" && pwd)
daemon=yes
. "$here/places.sh"
plist=$DESTDIR/Library/LaunchDaemons/kvq.wired-memory.plist
limit= undo=
while [ $# -gt 0 ]; do
    case "$1" in
    --undo) undo=yes ;;
    --wired-limit-mb) [ $# -ge 2 ] || usage; limit=$2; shift ;;
    *) usage ;;
    esac
    shift
done
case "$limit" in *[!0-9]*) echo "tune-mac: $limit is not a number of MiB" >&2; exit 2 ;; esac
[ "$(id -u)" = 0 ] || [ -n "$DESTDIR" ] || { echo "tune-mac: needs root" >&2; exit 1; }

if [ -n "$undo" ]; then
    boot_out system/kvq.wired-memory
    rm -f "$plist"
    sysctl iogpu.wired_limit_mb=0
    exit 0
fi

# sleep, disksleep: a worker that sleeps loses its jobs to others. autorestart: after a power cut.
# womp: wake by network, should it sleep after all. powernap: no wakes of its own.
pmset -a sleep 0 disksleep 0 autorestart 1 womp 1 powernap 0

if [ -n "$limit" ]; then
    total=$(($(sysctl -n hw.memsize) / 1048576))
    if [ "$limit" -gt "$((total - 8192))" ] && [ "$limit" -gt "$((total * 3 / 4))" ]; then
        echo "tune-mac: $limit of $total MiB leaves macOS too little" >&2
        exit 1
    fi
    mkdir -p "$(dirname "$plist")"
    sed "s/@MEGABYTES@/$limit/" "$here/kvq.wired-memory.plist" >"$plist.new"
    chmod 644 "$plist.new"
    chown 0:0 "$plist.new" || [ -n "$DESTDIR" ]
    mv "$plist.new" "$plist"
    boot_out system/kvq.wired-memory
    launchctl bootstrap system "$plist"
    sysctl "iogpu.wired_limit_mb=$limit"
fi
