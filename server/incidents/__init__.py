"""The life of incidents: opened, refined, resolved."""
