"""What fitting knows of each kind of world: how its networks are made, what they learn, how it redraws."""
