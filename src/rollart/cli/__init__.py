"""Commands: parse arguments, call `app` or `bench`, and print."""
