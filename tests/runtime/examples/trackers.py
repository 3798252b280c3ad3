"""A tracker defined by the script."""

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process


class Notebook(GeneralTracker):
    name = "notebook"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.lines = []

    @property
    def tracker(self):
        return self.lines

    @on_main_process
    def store_init_configuration(self, values):
        self.lines.append(values)

    @on_main_process
    def log(self, values, step=None):
        self.lines.append((step, values))


notebook = Notebook()
accelerator = Accelerator(log_with=notebook)
accelerator.init_trackers("example", config={"lr": 0.1})
for step in range(2):
    accelerator.log({"loss": 1.0 / (1 + step)}, step=step)
accelerator.end_training()
accelerator.print(notebook.lines)
