"""The same task with other libraries, each in an environment of its own."""
