"""Pure numerics: `advantage` (numpy, used by the controller), and in torch, used by trainers, `loss` over a `packed`
batch, `correction` of what other versions sampled, and the `metrics` of both."""
