-- Script for wrk: posts each line of a file over all connections and prints the result as JSON.
--   wrk -t1 -c64 -d3s -s post.lua URL -- BODIES
-- The file must have more lines than are posted in the time: repeated lines are duplicates and count as `others`.

local prepared = {}
local next_index = 0
queued, others = 0, 0
local the_thread

function setup(thread)
  the_thread = thread
end

function init(args)
  local headers = { ["Content-Type"] = "application/json" }
  for line in io.lines(args[1]) do
    prepared[#prepared + 1] = wrk.format("POST", nil, headers, line)
  end
end

function request()
  next_index = next_index % #prepared + 1
  return prepared[next_index]
end

function response(status, headers, body)
  if status == 200 and body == '{"status":"queued"}' then
    queued = queued + 1
  else
    others = others + 1
  end
end

function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    '{"queued": %d, "others": %d, "seconds": %.6f, "p50_ms": %.3f, "p99_ms": %.3f, "errors": %d}\n',
    the_thread:get("queued"), the_thread:get("others"), summary.duration / 1e6,
    latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    errors.connect + errors.read + errors.write + errors.timeout))
end
