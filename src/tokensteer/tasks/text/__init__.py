"""Film reviews in word pieces (`text`)."""
