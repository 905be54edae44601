"""A trace as stage 07 writes it on simulated devices, of steps that are known."""

COMPUTE, COMMUNICATION = 0, 1  # lanes


def mesh_trace(steps, tensor_axis="tensor"):
    """A step of 4 us, of which 1 us goes because all messages have one stream. Each operation takes 1 us:

        compute         backward 2    |  (waits)      sum's use, update
        communication                 |  reduce 2     sum

    The sum of `tensor_axis` is enqueued after the reduction along data, for whose numbers it need not wait.
    The update waits for both."""
    events = [{"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "sim:0"}}]
    counts = {COMPUTE: 0, COMMUNICATION: 0}

    def add(lane, name, begin, layer="", after=()):
        events.append({"ph": "X", "pid": 0, "tid": lane, "name": name, "ts": float(begin), "dur": 1.0,
                       "args": {"layer": layer, "queued": 0.0, **({"after": [list(each) for each in after]}
                                                                  if after else {})}})
        counts[lane] += 1
        return 0, lane, counts[lane] - 1
    for step in range(steps):
        at = 4 * step
        backward = add(COMPUTE, "backward", at, "fc2")
        reduced = add(COMMUNICATION, "all_reduce", at + 1, "reduce fc2/along data", [backward])
        added = add(COMMUNICATION, "all_reduce", at + 2, f"along {tensor_axis}", [backward])
        add(COMPUTE, "sgd_update", at + 3, "", [reduced, added])
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"zero_ns": 0, "command": []}}
