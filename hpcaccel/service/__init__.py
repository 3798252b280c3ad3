"""The service: REST, the page, and the client of both. It acts as the user who started it, and stores nothing."""
