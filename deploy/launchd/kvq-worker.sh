#!/bin/sh
# What launchd starts: the worker, with the settings in worker.env.
#
#   kvq-worker.sh VENV SUPPORT LOGS
#
# A worker whose Redis is away ends, and one whose store is away does with status 75; launchd starts
# it again ten seconds later, until they are back.
set -eu
venv=$1
support=$2
logs=$3

# Homebrew's programs, and no more than launchd gives otherwise.
PATH=$venv/bin:/opt/homebrew/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin
export PATH

set -a
. "$support/worker.env"
set +a

# exec: launchd's signals are for the worker itself.
exec "$venv/bin/kvq" worker --pid "$logs/worker.pid"
