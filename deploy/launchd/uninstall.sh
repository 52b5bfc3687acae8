#!/bin/sh
# Removes what install.sh installed. Settings and logs stay, unless --purge. What is stored stays.
#
#   uninstall.sh [--purge]
#   sudo uninstall.sh --daemon [--purge]
set -eu

here=$(cd "$(dirname "$0")" && pwd)
daemon= purge=
for one in "$@"; do
    case "$one" in
    --daemon) daemon=yes ;;
    --purge) purge=yes ;;
    *)
        sed -n '2,/^set -eu$/s/^# \{0,1\}//p' "$0"
        exit 2
        ;;
    esac
done
. "$here/places.sh"
[ -z "$daemon" ] || [ "$(id -u)" = 0 ] || [ -n "$DESTDIR" ] || { echo "uninstall: --daemon needs root" >&2; exit 1; }

boot_out "$domain/kvq.worker"
rm -f "$plist"
[ -z "$daemon" ] || rm -f "$DESTDIR/etc/newsyslog.d/kvq.conf"
rm -f "$DESTDIR$support/kvq-worker.sh" "$DESTDIR$support/newsyslog.conf" \
    "$DESTDIR$logs/worker.pid"
if [ -n "$purge" ]; then
    rm -rf "$DESTDIR$support" "$DESTDIR$logs"
fi
echo "the worker is gone; jobs that it held go on elsewhere"
