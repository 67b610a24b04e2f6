"""What is wrong with an installation and a launch, before a job finds out.

Every check is a function of facts, which the ranks gather first. So each rank does the same, and
what a check says can be tested without the machine that it is about.
"""

from mpistrat.doctor.facts import Finding, Level
from mpistrat.doctor.report import Report, examine

__all__ = ["Finding", "Level", "Report", "examine"]
