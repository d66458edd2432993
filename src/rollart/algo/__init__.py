"""Pure numerics: `advantage` in numpy, used by the controller; in torch, used by trainers, `loss` over a `packed`
batch, off-policy `correction` and their `metrics`."""
