#!/bin/sh
# Makes a certificate authority of your own and a server's certificate, for TLS in a local network.
#
#   make-certs.sh FOLDER NAME...
#
# NAMEs are the host names and addresses by which clients reach the server. Clients get ca.crt
# (KVQ_REDIS_CA); the server gets server.crt, server.key and ca.crt; ca.key stays in a drawer.
# Run it again before the certificate ends (after two years): the authority is kept.
set -eu

if [ $# -lt 2 ]; then
    sed -n '2,/^set -eu$/s/^# \{0,1\}//p' "$0"
    exit 2
fi
folder=$1
shift
umask 077
mkdir -p "$folder"
cd "$folder"

names=
for name in "$@"; do
    case "$name" in
    *:*) kind=IP ;;
    *[!0-9.]*) kind=DNS ;;
    *) kind=IP ;;
    esac
    names="$names${names:+,}$kind:$name"
done

if [ ! -e ca.key ]; then
    openssl req -x509 -newkey rsa:3072 -nodes -sha256 -days 3650 -keyout ca.key -out ca.crt \
        -subj "/CN=kvq queue authority" 2>/dev/null
fi
openssl req -newkey rsa:3072 -nodes -sha256 -keyout server.key -out server.csr \
    -subj "/CN=$1" 2>/dev/null
printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth\n' "$names" >server.ext
openssl x509 -req -sha256 -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 730 \
    -extfile server.ext -out server.crt 2>/dev/null
rm -f server.csr server.ext
echo "made in $folder: ca.crt, server.crt, server.key (for $names)"
