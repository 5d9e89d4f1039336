"""Add-ons: built on the core, they could be lifted out, a folder each; the core never names them."""
