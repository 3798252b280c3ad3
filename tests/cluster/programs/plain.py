"""A program without torch: prints its process id and arguments, then does what these say."""

import json
import os
import signal
import sys
import time

attempt = int(os.environ["HPCACCEL_ATTEMPT"])
print("starting", os.getpid(), json.dumps(sys.argv[1:], ensure_ascii=False), flush=True)
if "--fail" in sys.argv:
    raise ValueError("this one always fails")
if "--once" in sys.argv and attempt > 1:
    sys.exit()
if "--until" in sys.argv and attempt > int(sys.argv[sys.argv.index("--until") + 1]):
    sys.exit()
if "--wait" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    time.sleep(120)
