"""Pipeline-parallel inference: each rank holds one stage of a model.

``stage_split`` divides the model, ``traced_model`` traces it, ``pipelining`` builds the stages, and ``pipelined_batch``
runs a batch through them.
"""
