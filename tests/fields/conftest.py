collect_ignore = ["openenv_server.py"]  # run by the interpreter of another environment, which has its imports
