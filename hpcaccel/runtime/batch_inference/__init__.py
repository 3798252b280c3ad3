"""Batch inference: results of many items, computed by several ranks in any number of attempts.

``result_parts`` has the files, and what a kill leaves in them at each point; ``results_file`` has ``ResultsFile``, with
which a script reads and writes them.
"""
