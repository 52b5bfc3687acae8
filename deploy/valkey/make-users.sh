#!/bin/sh
# Makes users.acl with new passwords, and one file of settings for each role, in a folder that only
# you can read.
#
#   make-users.sh FOLDER [URL]
#
# URL is where the server will be, without a login: redis://queue.local:6379/0 (the default is this
# machine) or rediss://... for TLS. A folder that has users.acl already is left alone.
set -eu

usage() {
    sed -n '2,/^set -eu$/s/^# \{0,1\}//p' "$0"
    exit 2
}

[ $# -ge 1 ] && [ $# -le 2 ] || usage
case "$1" in -*) usage ;; esac
folder=$1
url=${2:-redis://127.0.0.1:6379/0}
case "$url" in
redis://*@* | rediss://*@*) echo "make-users: leave the login out of $url" >&2; exit 2 ;;
redis://?* | rediss://?*) ;;
*) echo "make-users: $url is not redis:// or rediss://" >&2; exit 2 ;;
esac
template=$(dirname "$0")/users.acl.in

if [ -e "$folder/users.acl" ]; then
    echo "make-users: $folder/users.acl exists; remove it to make new passwords" >&2
    exit 1
fi
umask 077
mkdir -p "$folder"

# 32 bytes, in letters that need no quoting in a URL.
new_password() {
    dd if=/dev/urandom bs=32 count=1 2>/dev/null | od -An -tx1 | tr -d ' \n'
}

digest() {
    if command -v sha256sum >/dev/null; then
        printf %s "$1" | sha256sum
    else
        printf %s "$1" | shasum -a 256
    fi | cut -d ' ' -f 1
}

script=$folder/.replace
: >"$script"
for role in producer worker operator metrics; do
    password=$(new_password)
    upper=$(printf %s "$role" | tr a-z A-Z)
    printf 's/@%s@/%s/\n' "$upper" "$(digest "$password")" >>"$script"
    printf 'KVQ_REDIS_URL=%s\n' "${url%%://*}://$role:$password@${url#*://}" >"$folder/$role.env"
done
awk '
    /^#/ || /^[[:space:]]*$/ { next }
    /^user / { if (line != "") print line; line = $0; next }
    { sub(/^[[:space:]]+/, " "); line = line $0 }
    END { print line }
' "$template" | sed -f "$script" >"$folder/users.acl"
rm "$script"
echo "made in $folder: users.acl for the server; producer.env, worker.env, operator.env and"
echo "metrics.env, each for the machines of that role and nobody else"
