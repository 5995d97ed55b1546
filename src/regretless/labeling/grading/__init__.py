"""Grades answers to mathematical problems; its only door is `grade` (and `quick_grade`, without an algebra system)."""

from regretless.labeling.grading.grader import gold_problem, grade, grade_any, quick_grade, quick_grade_any, warm_up

__all__ = ["gold_problem", "grade", "grade_any", "quick_grade", "quick_grade_any", "warm_up"]
