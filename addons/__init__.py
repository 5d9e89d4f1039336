"""Add-ons on top of the core, which never names them; each is a folder that could be split off."""
