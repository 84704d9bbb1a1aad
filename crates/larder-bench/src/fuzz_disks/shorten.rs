//! Shortens a failing case: fewer features, fewer steps, the same kind of fault.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use super::Case;
use super::fault::Fault;
use super::shape::REMOVABLE;

/// Time limit for shortening one case.
const SHORTENING_TIME_MAX: Duration = Duration::from_secs(60);
/// Attempts with each candidate: a seed does not determine which requests a kill interrupts.
const TRIES: u32 = 2;

struct CaseShortener<'a> {
    best: Case,
    fault: Fault,
    larder: &'a Path,
    folder: &'a Path,
    keep: &'a Path,
    give_up: Instant,
}

/// Returns the shortest case found and its fault. Its files are in `keep`.
pub(super) fn shorten(case: Case, fault: Fault, larder: &Path, directory: &Path, keep: &Path) -> (Case, Fault) {
    let mut this = CaseShortener {
        best: case,
        fault,
        larder,
        folder: directory,
        keep,
        give_up: Instant::now() + SHORTENING_TIME_MAX,
    };
    this.drop_later_steps();
    this.drop_steps();
    this.drop_features();
    this.drop_steps();
    (this.best, this.fault)
}

impl CaseShortener<'_> {
    /// Runs a case. If it fails with the same kind of fault, records it as the best one and returns `true`.
    fn fails(&mut self, case: Case) -> bool {
        for _ in 0..TRIES {
            if Instant::now() > self.give_up {
                return false;
            }
            match case.run(self.larder, self.folder, Some(self.keep)) {
                Err(fault) if fault.kind == self.fault.kind => {
                    (self.best, self.fault) = (case, fault);
                    return true;
                }
                _ => {}
            }
        }
        false
    }

    fn kept(&self) -> Vec<usize> {
        self.best.steps().iter().map(|(index, _)| *index).collect()
    }

    fn keeps(&mut self, kept: Vec<usize>) -> bool {
        let case = Case { kept: Some(kept), ..self.best.clone() };
        self.fails(case)
    }

    /// Tries to drop the steps after the one that failed.
    fn drop_later_steps(&mut self) {
        if let Some(failed) = self.fault.step {
            let kept = self.kept().into_iter().filter(|index| *index <= failed).collect();
            self.keeps(kept);
        }
    }

    /// Tries to drop ever smaller runs of steps, from the end.
    fn drop_steps(&mut self) {
        let mut len = self.kept().len().div_ceil(2).max(1);
        loop {
            let mut end = self.kept().len();
            while end > 0 {
                let start = end.saturating_sub(len);
                let mut kept = self.kept();
                kept.drain(start..end);
                self.keeps(kept);
                end = start;
            }
            if len == 1 {
                return;
            }
            len = len.div_ceil(2);
        }
    }

    fn drop_features(&mut self) {
        for feature in REMOVABLE {
            let mut case = self.best.clone();
            case.remove(feature);
            if case.shape != self.best.shape {
                self.fails(case);
            }
        }
    }
}

/// Describes a case in text.
pub(super) fn describe(case: &Case) -> String {
    let mut text = format!(
        "seed {}: {} bytes, {}\n  {:?}",
        case.seed,
        case.shape.size,
        case.shape.features().join(", "),
        case.shape
    );
    for (index, step) in case.steps() {
        text.push_str(&format!("\n  {index:3}  {step}"));
    }
    text
}

/// Formats numbers as `--steps` accepts them: 3,5-7; `none` for none.
pub(super) fn ranges(numbers: &[usize]) -> String {
    let mut parts: Vec<(usize, usize)> = Vec::new();
    for number in numbers {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == *number => *last = *number,
            _ => parts.push((*number, *number)),
        }
    }
    if parts.is_empty() {
        return "none".to_owned();
    }
    let parts = parts.iter().map(|(first, last)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    });
    parts.collect::<Vec<_>>().join(",")
}

/// Parses the format of [`ranges`]; `None` if there is no argument.
pub(super) fn numbers(parts: &[String]) -> anyhow::Result<Option<Vec<usize>>> {
    if parts.is_empty() {
        return Ok(None);
    }
    let mut numbers = Vec::new();
    for part in parts.iter().filter(|part| *part != "none") {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) =
            (first.parse().with_context(|| format!("'{part}'"))?, last.parse().with_context(|| format!("'{part}'"))?);
        if first > last || last > 1 << 20 {
            bail!("'{part}' is not a range");
        }
        numbers.extend(first..=last);
    }
    Ok(Some(numbers))
}
