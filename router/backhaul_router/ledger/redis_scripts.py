"""Lua scripts: the steps that Redis or Valkey does atomically.

A record is a hash: `v`, its version, drawn anew with every change; `h`, its head; `n`, the conversation's name; `e`, the ends of
histories by which it is found; and a field for the body of each branch. Heads and bodies mean nothing here (`redis_records`). A
change reads heads with `LOAD`, decides in Python, and is written by `COMMIT` if nobody has changed any of them meanwhile.

`life` tells one life of the data from the next: a server that was restarted, or a replica that was promoted, may have gone
back to an earlier state, in which a handle is on file that somebody has taken since.
"""

from __future__ import annotations

_COMMON = """
local function life()
  local server, replication = redis.call('INFO', 'server'), redis.call('INFO', 'replication')
  return string.match(server, 'run_id:(%x+)') .. ':' .. (string.match(replication, 'master_replid:(%x+)') or '')
end

local function load(out)
  local time = redis.call('TIME')
  out[#out + 1] = time[1]
  out[#out + 1] = time[2]
  out[#out + 1] = life()
  out[#out + 1] = redis.call('GET', KEYS[1]) or '0'
  for i = 2, #KEYS do
    local found = redis.call('HMGET', KEYS[i], 'v', 'h')
    out[#out + 1] = found[1] or ''
    out[#out + 1] = found[2] or ''
  end
  return out
end
"""

LOAD = (
    _COMMON
    + """
return load({})
"""
)
"""KEYS: the epoch, then records. Returns seconds and microseconds of the server's clock, the life, the epoch, and of each record
its version and its head, empty where there is none."""

COMMIT = (
    _COMMON
    + """
local at = 0
local function argument()
  at = at + 1
  return ARGV[at]
end

if life() ~= argument() then return load({0}) end
for i = 2, #KEYS do
  if (redis.call('HGET', KEYS[i], 'v') or '') ~= argument() then return load({0}) end
end

local wanted, field = tonumber(argument()), argument()
local body = ''
if wanted > 0 then body = redis.call('HGET', KEYS[wanted + 1], field) or '' end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + tonumber(time[2]) / 1000
local out = {1, body}
for i = 2, #KEYS do
  local key, what = KEYS[i], argument()
  if what ~= 'keep' then
    local index, name = argument(), argument()
    if what == 'drop' then
      redis.call('DEL', key)
      redis.call('ZREM', index, key)
    else
      local most, ttl, version, head = tonumber(argument()), tonumber(argument()), argument(), argument()
      local new = redis.call('EXISTS', key) == 0
      redis.call('HSET', key, 'v', version, 'h', head)
      for _ = 1, tonumber(argument()) do
        local id, bytes = argument(), argument()
        redis.call('HSET', key, id, bytes)
      end
      for _ = 1, tonumber(argument()) do redis.call('HDEL', key, argument()) end
      redis.call('PEXPIRE', key, ttl)
      redis.call('ZADD', index, now + ttl, key)
      if redis.call('PTTL', index) < ttl then redis.call('PEXPIRE', index, ttl) end
      if new then
        redis.call('ZREMRANGEBYSCORE', index, '-inf', now)
        while redis.call('ZCARD', index) > most do
          local oldest = redis.call('ZPOPMIN', index)[1]
          local gone = redis.call('HMGET', oldest, 'h', 'e', 'n')
          out[#out + 1] = gone[1] or ''
          for stop in string.gmatch(gone[2] or '', '%S+') do redis.call('ZREM', stop, gone[3]) end
          redis.call('DEL', oldest)
        end
      end
      local stops = {}
      for i = 1, tonumber(argument()) do stops[i] = argument() end
      redis.call('HSET', key, 'e', table.concat(stops, ' '), 'n', name)
      for _, stop in ipairs(stops) do
        redis.call('ZREMRANGEBYSCORE', stop, '-inf', now)
        redis.call('ZADD', stop, now + ttl, name)
        if redis.call('PTTL', stop) < ttl then redis.call('PEXPIRE', stop, ttl) end
      end
    end
    for _ = 1, tonumber(argument()) do redis.call('ZREM', argument(), name) end
  end
end
return out
"""
)
"""KEYS as in `LOAD`. ARGV: the life, the version that each record had; which record a body is wanted of (0 for none) and its
field; then for each record `keep`, or `drop` or `put` with what `redis_copy.WorkingCopy` writes. Returns 1, the body and the
heads of the records that made room; or 0 and what `LOAD` returns, where something has changed."""

FIND = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000
local epoch = redis.call('GET', KEYS[1]) or '0'
for i = 2, #KEYS do
  local found = redis.call('ZREVRANGEBYSCORE', KEYS[i], '+inf', now, 'LIMIT', 0, 1)[1]
  if found then return {epoch, found} end
end
return {epoch}
"""
"""KEYS: the epoch, then ends of histories, the longest first. Returns the epoch, and the conversation that was filed last under
the first end that has one."""

MOVE_EPOCH = """
return redis.call('INCR', KEYS[1])
"""
"""KEYS: the epoch. Every handle that was filed before is void from now on."""
