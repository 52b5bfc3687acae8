#!/bin/sh
# A whole fleet on one Linux machine, and everything that can happen to it, in about a minute.
#
#   rehearse.sh MODEL [FOLDER]
#
# MODEL is a small model's folder. Starts a server with users of few rights, two workers under
# supervisors and a producer with its own login; the store is on a mount of its own when you are root.
# Then: submit, kill a worker, kill the server, cut the power (all dies, the store is unmounted), start
# again, wait, verify, collect, submit again. At the end nothing may be lost. Everything is in FOLDER
# (default: a new one below TMPDIR) and is removed at the end unless KEEP=1.
#
# Needs `kvq[local]` on PATH. VALKEY_SERVER names another server than the one that is found.
set -eu

if [ $# -lt 1 ] || [ $# -gt 2 ] || [ ! -e "$1/config.json" ]; then
    sed -n '2,/^set -eu$/s/^# \{0,1\}//p' "$0"
    exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
model=$(cd "$1" && pwd)
if [ $# -eq 2 ]; then
    mkdir -p "$2"
    folder=$(cd "$2" && pwd)
else
    folder=$(mktemp -d)
fi
prompts_count=${PROMPTS:-40}
disk=$folder/disk
mount=$folder/mount
store=$mount/store
is_mounted=
umask 077
export KVQ_STORE="$store" KVQ_CACHE_DIR="$folder/cache" KVQ_QUEUE=rehearsal

say() { echo "== $*"; }
die() { echo "rehearse: $*" >&2; exit 1; }

# Ending: everything that was started, whatever happened.
end() {
    status=$?
    trap - EXIT INT TERM
    cut_power
    [ -z "$is_mounted" ] || umount "$mount" 2>/dev/null || true
    if [ "$status" -ne 0 ]; then
        tail -n 3 "$folder"/*.log | cut -c 1-300 >&2 || true
        echo "rehearse: failed; what is left is in $folder" >&2
    elif [ -z "${KEEP:-}" ]; then
        rm -rf "$folder"
    fi
    exit "$status"
}

# A supervisor as launchd and systemd are, which runs a command again and again. It and what it runs
# are a group of processes of their own.
supervise() {
    log=$folder/$1.log pid=$folder/$1.pid group=$folder/$1.group
    shift
    setsid sh -c '
        log=$1 pid=$2
        shift 2
        while :; do
            "$@" >>"$log" 2>&1 &
            echo $! >"$pid"
            wait $! || true
            sleep 0.2
        done' supervisor "$log" "$pid" "$@" 2>/dev/null &
    echo $! >"$group"
}

# Ends every supervisor and what it runs, at once.
cut_power() {
    for file in "$folder"/*.group; do
        [ -e "$file" ] || continue
        kill -KILL "-$(cat "$file")" 2>/dev/null || true
        rm "$file"
    done
    wait 2>/dev/null || true
}

# kvq with the login of a role and nothing else of the environment's.
as() (
    set -a
    . "$folder/etc/$1.env"
    set +a
    shift
    exec "$@"
)

worker() (
    set -a
    . "$folder/etc/worker.env"
    KVQ_MODELS=$model
    KVQ_STEP=64
    KVQ_LOG_FORMAT=json
    set +a
    supervise "$1" kvq worker
)

power_on() {
    supervise server "$server" "$folder/etc/valkey.conf"
    worker worker-1
    worker worker-2
}

mount_store() {
    [ -n "$is_mounted" ] || return 0
    mount --bind "$disk" "$mount"
}

finished() {
    as producer kvq status "$batch" --json | sed -n 's/.*"states": {"stored": \([0-9]*\).*/\1/p'
}

# Waits until a command succeeds, at most 60 seconds.
until_true() {
    deadline=$(($(date +%s) + 60))
    until "$@" >/dev/null 2>&1; do
        [ "$(date +%s)" -lt "$deadline" ] || die "not within a minute: $*"
        sleep 0.2
    done
}

some_are_stored() { [ "$(finished)" -ge "$1" ]; }

trap end EXIT
trap 'exit 130' INT TERM

server=${VALKEY_SERVER:-$(command -v valkey-server || command -v redis-server || true)}
[ -n "$server" ] || die "no server found: install Valkey, or set VALKEY_SERVER"
port=${PORT:-16399}

say "users, server, store"
sh "$here/valkey/make-users.sh" "$folder/etc" "redis://127.0.0.1:$port/0" >/dev/null
sed -e "s|/etc/valkey|$folder/etc|; s|/var/lib/valkey|$folder/etc|; s|^port .*|port $port|" \
    "$here/valkey/valkey.conf" >"$folder/etc/valkey.conf"
mkdir -p "$disk" "$mount"
if [ "$(id -u)" = 0 ] && mount --bind "$disk" "$mount" 2>/dev/null; then
    is_mounted=yes
    say "the store is on a mount of its own"
fi
awk -v count="$prompts_count" 'BEGIN {
    for (group = 0; group < 4; group++) {
        shared[group] = sprintf("Report %d. ", group)
        for (line = 0; line < 40; line++)
            shared[group] = shared[group] sprintf("Item %d of report %d is in order. ", line, group)
    }
    for (n = 0; n < count; n++)
        printf "{\"custom_id\": \"p%d\", \"prompt\": \"%sSummary %d:\"}\n", n, shared[n % 4], n
}' >"$folder/prompts.jsonl"

power_on
until_true as operator kvq status
as producer kvq submit "$folder/prompts.jsonl" --model "$model" --create-store \
    >"$folder/batch" 2>"$folder/submit.log"
batch=$(cat "$folder/batch")
say "submitted $prompts_count prompts as batch $batch"
head -n 2 "$folder/prompts.jsonl" | sed 's/Report/Remark/g; s/"p/"short-/' >"$folder/short.jsonl"
as producer kvq submit "$folder/short.jsonl" --model "$model" --ttl 1s >/dev/null 2>&1

until_true some_are_stored 2
say "kill a worker"
kill -KILL "$(cat "$folder/worker-1.pid")"
until_true some_are_stored 6
say "kill the server"
kill -KILL "$(cat "$folder/server.pid")"
until_true some_are_stored 10

say "cut the power: workers, server and supervisors die, the store is unmounted"
cut_power
[ -z "$is_mounted" ] || umount "$mount"

say "start again, the share a while after the rest"
power_on
sleep 2
mount_store
as producer kvq wait "$batch" --timeout 120 --json >"$folder/waited"
cat "$folder/waited"

say "look: every machine's doctor, every block, every result"
for role in producer worker; do
    as "$role" kvq doctor --role "$role" --quiet
done
as worker kvq verify
as producer kvq results "$batch" >"$folder/results.jsonl"
[ "$(grep -c '"status_code": 200' "$folder/results.jsonl")" -eq "$prompts_count" ] ||
    die "prompts are missing"

say "collect: what expires goes, what lives stays"
as worker kvq gc --yes --grace 1s --settle 0s
as worker kvq verify
[ "$(as worker kvq ls --json | grep -o '"name": "p[0-9]' | wc -l)" -eq \
    "$prompts_count" ] || die "gc took a cache that lives"

say "submit the same again: nothing is left to do"
as producer kvq submit "$folder/prompts.jsonl" --model "$model" 2>&1 |
    grep "$prompts_count stored already, 0 jobs"

say "figures"
as metrics kvq metrics --once |
    grep -E '^kvq_(jobs_(stored|failed|retried)|prefilled_tokens)_total|^kvq_store_files'
say "nothing was lost"
