"""How a rank shows that it lives: heartbeats, where its threads are, how long its own part of a step takes."""
