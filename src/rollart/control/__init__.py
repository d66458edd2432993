"""The control plane: thin asyncio shells over `policy`.

Time is the running loop's, randomness is passed in, and every coroutine lives in one ordered nursery, so the same code
runs for real and in virtual time.
"""
