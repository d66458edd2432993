"""The OpenAI dialect, as data: requests and their checks, answers, errors. No I/O, so that any server can speak it."""
