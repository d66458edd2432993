"""`rollart serve`: an OpenAI-compatible endpoint over the torch engine.

client ──► server (sockets, signals) ──► http (key, bodies, answers) ──► engine (queue, turns) ──► TorchEngine
                                             └─ model: conversations ◄─► tokens                    (a thread)
"""
