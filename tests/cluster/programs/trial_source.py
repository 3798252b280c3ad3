import json
import sys

folder, worker = sys.argv[1:]
hello = json.loads(sys.stdin.readline())
for slot in range(hello["slots"]):
    print(json.dumps({"run": int(worker) * hello["slots"] + slot, "slot": slot}), flush=True)
ended = 0
for line in sys.stdin:
    event = json.loads(line)
    if event["event"] == "ended" and event["decision"] == "end":
        ended += 1
        if ended == hello["slots"]:
            print(json.dumps({"end": True, "why": "all have ended"}), flush=True)
            break
