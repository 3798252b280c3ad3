"""Notices to a webhook: events are derived from the files of a run or a sweep, and each is delivered once.

The batch step starts one sender process (``sender_process``), which never delays a supervisor or a rank. The sender
compares the events in the run's files with the outbox ``notices.jsonl``, and posts what is missing there. No event
is in memory only: what a killed process could not deliver, the next sender of the run delivers.
"""
