"""The methods of the Accelerator, one page for each idea. What they do lives in the modules they call."""
