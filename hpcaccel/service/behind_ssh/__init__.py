"""Runs on clusters behind SSH, shown by a service on the user's own machine; no port is opened on any cluster."""
