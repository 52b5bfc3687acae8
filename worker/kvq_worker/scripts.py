"""What a worker must do in Redis in one piece, as Lua. The server's clock decides, not ours."""

from __future__ import annotations

#: Shows that an execution is alive, and asks whether it should go on.
#:
#: KEYS  wip, job, execution, executions of the job, worker, executions of the worker
#: ARGV  job id:execution id, execution id, lease (s), worker ttl (s), tokens done, tokens in all,
#:       now as text, now as seconds, tokens stored when it began (empty: not known yet), retries
#: A job that begins further on than the time before has all its retries again: what it did so far
#: is stored, so it comes to an end.
#: Returns 1 while the execution holds its job, else 0; 1 when the job was canceled; 1 when Redis
#: has forgotten the worker.
BEAT = """
local forgotten = redis.call('EXISTS', KEYS[5]) == 0 and 1 or 0
redis.call('HSET', KEYS[5], 'last_heartbeat', ARGV[7])
redis.call('EXPIRE', KEYS[5], ARGV[4])
redis.call('EXPIRE', KEYS[6], ARGV[4])
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) or redis.call('EXISTS', KEYS[2]) == 0 then
  return {0, 0, forgotten}
end
local lease = tonumber(ARGV[3])
local expires = tonumber(redis.call('TIME')[1]) + lease
redis.call('ZADD', KEYS[1], 'XX', expires, ARGV[1])
redis.call('HSET', KEYS[3], 'last_heartbeat', ARGV[8])
redis.call('EXPIRE', KEYS[3], lease + 60)
redis.call('ZADD', KEYS[4], 'XX', expires + 60, ARGV[2])
redis.call('EXPIRE', KEYS[4], lease + 60)
redis.call('HSET', KEYS[2], 'last_heartbeat', ARGV[7], 'kvq_done', ARGV[5], 'kvq_total', ARGV[6])
if ARGV[9] ~= '' then
  local before = tonumber(redis.call('HGET', KEYS[2], 'kvq_start'))
  if not before or tonumber(ARGV[9]) > before then
    redis.call('HSET', KEYS[2], 'kvq_start', ARGV[9])
    if before then redis.call('HSET', KEYS[2], 'retries_left', ARGV[10]) end
  end
end
return {1, redis.call('HEXISTS', KEYS[2], 'kvq_cancel'), forgotten}
"""

#: Ends an execution without a result.
#:
#: KEYS  wip, job, execution, executions of the job, executions of the worker, queue, canceled
#: ARGV  job id:execution id, execution id, job id, again (run it again, before all others) or
#:       canceled or lost, now as text, now as seconds
#: Returns 1 when the execution held its job, else 0: then another has it, and nothing is touched.
END = """
local held = redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[4], ARGV[2])
redis.call('SREM', KEYS[5], ARGV[1])
redis.call('DEL', KEYS[3])
if held == 0 or ARGV[4] == 'lost' or redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
redis.call('HDEL', KEYS[2], 'kvq_done', 'kvq_total', 'worker_name', 'started_at')
if ARGV[4] == 'canceled' or redis.call('HEXISTS', KEYS[2], 'kvq_cancel') == 1 then
  redis.call('HSET', KEYS[2], 'status', 'canceled', 'ended_at', ARGV[5])
  redis.call('HDEL', KEYS[2], 'kvq_cancel')
  redis.call('EXPIRE', KEYS[2], tonumber(redis.call('HGET', KEYS[2], 'result_ttl') or 86400))
  redis.call('ZADD', KEYS[7], ARGV[6], ARGV[3])
else
  redis.call('HSET', KEYS[2], 'status', 'queued', 'enqueued_at', ARGV[5])
  redis.call('LPUSH', KEYS[6], ARGV[3])
end
return 1
"""

_STATUS_OF = """
-- Status of a job; nothing for a key that holds something else, which anybody may have put there.
local function status_of(key)
  local status = redis.pcall('HGET', key, 'status')
  return type(status) == 'string' and status or false
end
"""

_RELEASE = (
    _STATUS_OF
    + """
local PENDING = {queued=true, started=true, deferred=true, scheduled=true,
                 ready_to_enqueue=true, created=true}

-- Puts into the queue those of `ids` that wait for nothing any more, first come first.
local function release(jobs, queue, deferred, ids)
  local free, gone = {}, {}
  for _, id in ipairs(ids) do
    local key, waits = jobs .. id, jobs .. ':' .. id .. ':dependencies'
    local status = status_of(key)
    if status ~= 'deferred' then
      redis.call('ZREM', deferred, id)
      gone[#gone + 1] = id
    else
      local unmet = false
      for _, parent in ipairs(redis.call('SMEMBERS', waits)) do
        local state = status_of(jobs .. parent)
        unmet = unmet or (state and PENDING[state])
      end
      if not unmet then
        redis.call('DEL', waits)
        free[#free + 1] = {tonumber(redis.call('ZSCORE', deferred, id) or 0), id}
      end
    end
  end
  table.sort(free, function(a, b) return a[1] > b[1] or (a[1] == b[1] and a[2] > b[2]) end)
  for _, pair in ipairs(free) do
    redis.call('HSET', jobs .. pair[2], 'status', 'queued')
    redis.call('HDEL', jobs .. pair[2], 'dependency_ids', 'dependency_id')
    redis.call('ZREM', deferred, pair[2])
    redis.call('LPUSH', queue, pair[2])
    gone[#gone + 1] = pair[2]
  end
  return gone, #free
end
"""
)

#: Lets the jobs go that waited for one that is over.
#:
#: KEYS  queue, deferred, dependents of the job    ARGV  job prefix, how many at most
#: Returns 1 while there are more, and how many went into the queue, before all others.
RELEASE = (
    _RELEASE
    + """
local ids = redis.call('SPOP', KEYS[3], ARGV[2])
local _, free = release(ARGV[1], KEYS[1], KEYS[2], ids)
return {redis.call('EXISTS', KEYS[3]), free}
"""
)

#: The same for a stretch of all that wait, whatever became of the worker that should have done it.
#:
#: KEYS  queue, deferred    ARGV  job prefix, place to begin at, how many
#: Returns the place to begin at the next time, and how many went into the queue.
SWEEP_DEFERRED = (
    _RELEASE
    + """
local from, count = tonumber(ARGV[2]), tonumber(ARGV[3])
local ids = redis.call('ZRANGE', KEYS[2], from, from + count - 1)
local gone, free = release(ARGV[1], KEYS[1], KEYS[2], ids)
return {#ids < count and 0 or from + count - #gone, free}
"""
)

#: Puts jobs back that a worker popped and then died before it started them.
#:
#: KEYS  queue, intermediate, wip, hash of when each was first seen popped
#: ARGV  job prefix, how long (s) a job may be popped without being started
#: Returns how many went back, before all others.
RECOVER_POPPED = (
    _STATUS_OF
    + """
local ids = redis.call('LRANGE', KEYS[2], 0, -1)
local back, running, there = 0, {}, {}
local now = tonumber(redis.call('TIME')[1])
if #ids > 0 then
  for _, entry in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
    running[string.match(entry, '^[^:]+')] = true
  end
end
for _, id in ipairs(ids) do
  there[id] = true
  local status = status_of(ARGV[1] .. id)
  if running[id] then
    -- Its worker takes it off this list as soon as it starts it.
  elseif status ~= 'queued' then
    redis.call('LREM', KEYS[2], 1, id)
    there[id] = nil
  else
    local seen = redis.call('HGET', KEYS[4], id)
    if not seen then
      redis.call('HSET', KEYS[4], id, now)
    elseif now - tonumber(seen) >= tonumber(ARGV[2]) then
      redis.call('LREM', KEYS[2], 1, id)
      redis.call('LPUSH', KEYS[1], id)
      there[id] = nil
      back = back + 1
    end
  end
end
for _, id in ipairs(redis.call('HKEYS', KEYS[4])) do
  if not there[id] then redis.call('HDEL', KEYS[4], id) end
end
return back
"""
)
