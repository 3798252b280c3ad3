import sys
from ast import literal_eval

compile, learning_rate, max_iters, out_dir, wandb_log = True, 1e-3, 100, "out", False
for arg in sys.argv[1:]:
    assert arg.startswith("--")
    key, val = arg.split("=")
    key = key[2:]
    try:
        attempt = literal_eval(val)
    except (SyntaxError, ValueError):
        attempt = val
    assert type(attempt) is type(globals()[key])
    globals()[key] = attempt
print(compile, learning_rate, max_iters, repr(out_dir), wandb_log, sep="|")
