"""What an end task is made of: data, classifier, predictions, scores."""
