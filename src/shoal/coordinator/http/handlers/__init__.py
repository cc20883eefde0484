"""The handlers of the routes, one file per kind of caller."""
