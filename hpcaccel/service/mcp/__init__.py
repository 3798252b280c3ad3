"""``hpcaccel mcp``: the verbs of the client as tools for agents, over the Model Context Protocol."""
