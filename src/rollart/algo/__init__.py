"""Pure numerics: `advantage` (numpy, used by the controller) and `loss` (torch, used by trainers)."""
