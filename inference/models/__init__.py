"""Loading a target model: names, number formats, what is supported."""
