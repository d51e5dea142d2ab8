"""One file a recipe: model, data, Trainer subclass. Recipes never import each other."""
