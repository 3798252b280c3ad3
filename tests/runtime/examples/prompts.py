"""Prompts split between the processes, with the answers gathered in order."""

from accelerate import PartialState
from accelerate.utils import gather_object

state = PartialState()
prompts = [f"prompt {number}" for number in range(5)]
with state.split_between_processes(prompts) as mine:
    answers = [prompt.upper() for prompt in mine]
answers = gather_object(answers)
if state.is_main_process:
    print(answers)
