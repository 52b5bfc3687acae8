"""What must happen in Redis in one piece, as Lua.

A job is RQ's: a hash, an id in the queue's list, and its registries. `PENDING` are the states in
which a job will run or is running without anybody's doing.
"""

from __future__ import annotations

_PENDING = """
local PENDING = {queued=true, started=true, deferred=true, scheduled=true,
                 ready_to_enqueue=true, created=true}
"""

#: Puts jobs into the queue unless the same work is there already.
#:
#: KEYS  queue, queues, registries deferred, finished, failed, canceled
#: ARGV  job prefix, results prefix, batch, lifetime (s), now (s), n, n strings of fields that all
#:       jobs share, then for each job: id, L or R (which end), 1 to trust a finished one,
#:       data, description, p, p ids of jobs it waits for
#: Returns a list of one word a job: new, deferred, pending (the same work is under way), or done.
ENQUEUE = (
    _PENDING
    + """
local jobs, results, batch = ARGV[1], ARGV[2], ARGV[3]
local lifetime, now, shared = tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6])
local at, out = 7 + shared, {}
redis.call('SADD', KEYS[2], KEYS[1])

local function join(key)
  local have = redis.call('HGET', key, 'kvq_batches') or ''
  if not string.find(',' .. have .. ',', ',' .. batch .. ',', 1, true) then
    redis.call('HSET', key, 'kvq_batches', have == '' and batch or have .. ',' .. batch)
  end
  local ttl = tonumber(redis.call('HGET', key, 'result_ttl') or 0)
  if ttl < lifetime then
    redis.call('HSET', key, 'result_ttl', lifetime, 'failure_ttl', lifetime)
  end
end

local function outlive(key)
  local ttl = redis.call('TTL', key)
  if ttl >= 0 and ttl < lifetime then redis.call('EXPIRE', key, lifetime) end
end

while at <= #ARGV do
  local id, place, trust = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local data, description, parents = ARGV[at + 3], ARGV[at + 4], tonumber(ARGV[at + 5])
  local key = jobs .. id
  local status = redis.call('HGET', key, 'status')
  local word
  if status and PENDING[status] then
    join(key)
    outlive(key)
    redis.call('HDEL', key, 'kvq_cancel')
    word = 'pending'
  elseif status == 'finished' and trust == '1'
      and redis.call('HGET', key, 'kvq_outcome') == 'stored' then
    join(key)
    outlive(key)
    outlive(results .. id)
    word = 'done'
  else
    if status then
      redis.call('DEL', key, results .. id)
      for registry = 4, 6 do redis.call('ZREM', KEYS[registry], id) end
    end
    local waits = jobs .. ':' .. id .. ':dependencies'
    redis.call('DEL', waits)
    local unmet = {}
    for i = at + 6, at + 5 + parents do
      local parent = redis.call('HGET', jobs .. ARGV[i], 'status')
      if parent and PENDING[parent] then
        redis.call('SADD', jobs .. ARGV[i] .. ':dependents', id)
        redis.call('EXPIRE', jobs .. ARGV[i] .. ':dependents', lifetime)
        redis.call('SADD', waits, ARGV[i])
        unmet[#unmet + 1] = '"' .. ARGV[i] .. '"'
      end
    end
    redis.call('HSET', key, 'data', data, 'description', description, 'kvq_batches', batch,
               'status', 'queued', unpack(ARGV, 7, 6 + shared))
    redis.call('EXPIRE', key, lifetime)
    if #unmet > 0 then
      redis.call('EXPIRE', waits, lifetime)
      redis.call('HSET', key, 'status', 'deferred',
                 'dependency_ids', '[' .. table.concat(unmet, ',') .. ']')
      redis.call('ZADD', KEYS[3], now, id)
      word = 'deferred'
    else
      redis.call(place == 'L' and 'LPUSH' or 'RPUSH', KEYS[1], id)
      word = 'new'
    end
  end
  out[#out + 1] = word
  at = at + 6 + parents
end
return out
"""
)

#: Stores bytes under a key unless they are there, for at least a lifetime.
#:
#: KEYS  key    ARGV  bytes, lifetime (s)
KEEP = """
local ttl = redis.call('TTL', KEYS[1])
if ttl == -2 then
  redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
elseif ttl >= 0 and ttl < tonumber(ARGV[2]) then
  redis.call('EXPIRE', KEYS[1], ARGV[2])
end
"""

#: How jobs stand, in one letter each: queued, deferred, running, stored, failed for a reason of
#: its own, died (RQ gave up), canceled, lost (Redis does not know it).
#:
#: ARGV  job prefix, then ids
#: Returns the letters as one string, then for each running job: its place (from 0), tokens done,
#: tokens in all.
STATUS = """
local LETTER = {queued='q', deferred='w', scheduled='q', ready_to_enqueue='q', created='q',
                started='r', failed='d', stopped='d', canceled='c'}
local letters, out = {}, {''}
for i = 2, #ARGV do
  local facts = redis.call('HMGET', ARGV[1] .. ARGV[i], 'status', 'kvq_outcome', 'kvq_done',
                           'kvq_total')
  local letter = 'l'
  if facts[1] == 'finished' then
    letter = facts[2] == 'failed' and 'f' or 's'
  elseif facts[1] then
    letter = LETTER[facts[1]] or 'q'
  end
  letters[#letters + 1] = letter
  if letter == 'r' then
    out[#out + 1] = i - 2
    out[#out + 1] = facts[3] or '0'
    out[#out + 1] = facts[4] or '0'
  end
end
out[1] = table.concat(letters)
return out
"""

#: What jobs returned.
#:
#: ARGV  job prefix, results prefix, then ids
#: Returns for each job: status, outcome, worker, retries left, the newest result's fields (flat).
RESULTS = """
local out = {}
for i = 3, #ARGV do
  local facts = redis.call('HMGET', ARGV[1] .. ARGV[i], 'status', 'kvq_outcome', 'worker_name',
                           'retries_left')
  local newest = redis.call('XREVRANGE', ARGV[2] .. ARGV[i], '+', '-', 'COUNT', 1)
  out[#out + 1] = {facts[1] or '', facts[2] or '', facts[3] or '', facts[4] or '',
                   newest[1] and newest[1][2] or {}}
end
return out
"""

#: Takes a batch off jobs; what no other batch wants is dropped, or told to stop when it runs.
#:
#: KEYS  registries deferred, finished, failed, canceled
#: ARGV  job prefix, batch, then ids
#: Returns one word a job: dropped, stopping, shared (another batch wants it), or over.
CANCEL = (
    _PENDING
    + """
local out = {}
for i = 3, #ARGV do
  local id, word = ARGV[i], 'over'
  local key = ARGV[1] .. id
  local facts = redis.call('HMGET', key, 'status', 'kvq_batches')
  if facts[1] and PENDING[facts[1]] then
    local others = {}
    for one in string.gmatch(facts[2] or '', '[^,]+') do
      if one ~= ARGV[2] then others[#others + 1] = one end
    end
    if #others > 0 then
      redis.call('HSET', key, 'kvq_batches', table.concat(others, ','))
      word = 'shared'
    elseif facts[1] == 'started' then
      redis.call('HSET', key, 'kvq_cancel', 1, 'kvq_batches', '')
      word = 'stopping'
    else
      redis.call('DEL', key, ARGV[1] .. ':' .. id .. ':dependencies')
      for registry = 1, 4 do redis.call('ZREM', KEYS[registry], id) end
      word = 'dropped'
    end
  end
  out[#out + 1] = word
end
return out
"""
)

#: Takes ids of jobs that are gone off the queue.
#:
#: KEYS  queue    ARGV  job prefix
#: Returns how many were taken off.
SWEEP = """
local ids, kept = redis.call('LRANGE', KEYS[1], 0, -1), {}
for _, id in ipairs(ids) do
  if redis.call('EXISTS', ARGV[1] .. id) == 1 then kept[#kept + 1] = id end
end
if #kept < #ids then
  redis.call('DEL', KEYS[1])
  for from = 1, #kept, 1000 do
    redis.call('RPUSH', KEYS[1], unpack(kept, from, math.min(from + 999, #kept)))
  end
end
return #ids - #kept
"""

#: Runs failed jobs again.
#:
#: KEYS  queue, registries finished, failed, canceled
#: ARGV  job prefix, results prefix, batch, lifetime (s), retries, then ids
#: Returns one word a job: again, pending, stored, or lost.
RETRY = (
    _PENDING
    + """
local out = {}
for i = 6, #ARGV do
  local id, word = ARGV[i], 'again'
  local key = ARGV[1] .. id
  local facts = redis.call('HMGET', key, 'status', 'kvq_outcome')
  if not facts[1] then
    word = 'lost'
  elseif PENDING[facts[1]] then
    word = 'pending'
  elseif facts[1] == 'finished' and facts[2] == 'stored' then
    word = 'stored'
  else
    redis.call('DEL', ARGV[2] .. id)
    for registry = 2, 4 do redis.call('ZREM', KEYS[registry], id) end
    redis.call('HDEL', key, 'kvq_outcome', 'kvq_cancel', 'kvq_done', 'kvq_total', 'kvq_start',
               'ended_at', 'started_at', 'worker_name', 'exc_info')
    redis.call('HSET', key, 'status', 'queued', 'retries_left', ARGV[5], 'kvq_batches', ARGV[3])
    redis.call('EXPIRE', key, ARGV[4])
    redis.call('RPUSH', KEYS[1], id)
  end
  out[#out + 1] = word
end
return out
"""
)
