"""A trace as stage 07 writes it on simulated devices, of steps that are known."""

COMPUTE, COMMUNICATION = 0, 1  # lanes
# Operations on the communication's lane: name, range, whether it waits for backward.
TWO_AXES = (("all_reduce", "reduce fc2/along data", True), ("all_reduce", "along tensor", True))


def mesh_trace(steps, messages=TWO_AXES):
    """Each operation takes 1 us, and a step one for each message and two more:

        compute         backward 2    |  (waits)      update
        communication                 |  reduce 2     sum

    The sum along tensor is enqueued after the reduction along data, for whose numbers it need not wait. The
    update waits for all."""
    events = [{"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "sim:0"}}]
    counts = {COMPUTE: 0, COMMUNICATION: 0}

    def add(lane, name, begin, layer="", after=()):
        waits = {"after": [list(each) for each in after]} if after else {}
        events.append({"ph": "X", "pid": 0, "tid": lane, "name": name, "ts": float(begin), "dur": 1.0,
                       "args": {"layer": layer, "queued": 0.0, **waits}})
        counts[lane] += 1
        return 0, lane, counts[lane] - 1
    for step in range(steps):
        at = (len(messages) + 2) * step
        backward = add(COMPUTE, "backward", at, "fc2")
        sent = [add(COMMUNICATION, name, at + 1 + place, layer, [backward] if waits else [])
                for place, (name, layer, waits) in enumerate(messages)]
        add(COMPUTE, "sgd_update", at + 1 + len(messages), "", sent)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"zero_ns": 0, "command": []}}
