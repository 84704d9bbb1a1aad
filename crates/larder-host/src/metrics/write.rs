//! Writer of the exposition formats: <https://prometheus.io/docs/specs/om/open_metrics_spec/>, and
//! <https://prometheus.io/docs/instrumenting/exposition_formats/>.

use std::fmt::{Display, Write};

use larder_vm::control::state::Latency;

use super::ExpositionFormat;
use super::families::{Family, MetricKind};

/// Bucket bounds as powers of two of nanoseconds: from 8 µs to 8.6 s, each twice the one before. They are bounds of
/// the control socket's buckets, too, so that each of those lies within one of these.
const BOUNDS_NS: std::ops::RangeInclusive<u32> = 13..=33;

/// Label names and values, formatted once.
pub(super) struct Labels(String);

impl Labels {
    pub(super) fn new(all: &[(&str, &str)]) -> Self {
        let mut labels = Self(String::new());
        all.iter().for_each(|(name, value)| labels.add(name, value));
        labels
    }

    fn add(&mut self, name: &str, value: &str) {
        if !self.0.is_empty() {
            self.0.push(',');
        }
        self.0.push_str(name);
        self.0.push_str("=\"");
        for c in value.chars() {
            match c {
                '\\' => self.0.push_str("\\\\"),
                '"' => self.0.push_str("\\\""),
                '\n' => self.0.push_str("\\n"),
                c => self.0.push(c),
            }
        }
        self.0.push('"');
    }
}

pub(super) struct ExpositionWriter {
    text: String,
    format: ExpositionFormat,
}

impl ExpositionWriter {
    pub(super) fn new(format: ExpositionFormat) -> Self {
        Self { text: String::new(), format }
    }

    /// Begins a metric family.
    pub(super) fn family<'a>(&'a mut self, family: &'a Family) -> SampleWriter<'a> {
        let (name, kind) = match (self.format, family.kind) {
            (ExpositionFormat::OpenMetrics, kind) => (family.name.to_owned(), kind.name()),
            (ExpositionFormat::Text, MetricKind::Info) => (format!("{}_info", family.name), MetricKind::Gauge.name()),
            (ExpositionFormat::Text, MetricKind::Counter) => {
                (format!("{}_total", family.name), MetricKind::Counter.name())
            }
            (ExpositionFormat::Text, kind) => (family.name.to_owned(), kind.name()),
        };
        let _ = writeln!(self.text, "# HELP {name} {}.", family.help);
        let _ = writeln!(self.text, "# TYPE {name} {kind}");
        if let (ExpositionFormat::OpenMetrics, Some(unit)) = (self.format, family.unit) {
            let _ = writeln!(self.text, "# UNIT {name} {unit}");
        }
        let suffix = match family.kind {
            MetricKind::Counter => "_total",
            MetricKind::Info => "_info",
            MetricKind::Gauge | MetricKind::Histogram => "",
        };
        SampleWriter { text: &mut self.text, name: family.name, suffix, labels: "" }
    }

    pub(super) fn end(mut self) -> String {
        if self.format == ExpositionFormat::OpenMetrics {
            self.text.push_str("# EOF\n");
        }
        self.text
    }
}

/// Writer of the samples of one family.
pub(super) struct SampleWriter<'a> {
    text: &'a mut String,
    name: &'a str,
    suffix: &'static str,
    labels: &'a str,
}

impl<'a> SampleWriter<'a> {
    /// Sets the labels of the samples that follow.
    pub(super) fn with_labels(&mut self, labels: &'a Labels) -> &mut Self {
        self.labels = &labels.0;
        self
    }

    pub(super) fn value(&mut self, value: impl Display) {
        self.line(self.suffix, "", value);
    }

    pub(super) fn bool_value(&mut self, value: bool) {
        self.value(u8::from(value));
    }

    pub(super) fn seconds(&mut self, nanos: u64) {
        self.value(nanos as f64 / 1e9);
    }

    pub(super) fn labelled_value(&mut self, labels: &[(&str, &str)], value: impl Display) {
        self.line(self.suffix, &Labels::new(labels).0, value);
    }

    pub(super) fn histogram(&mut self, times: &Latency) {
        self.labelled_histogram(&[], times);
    }

    pub(super) fn labelled_histogram(&mut self, labels: &[(&str, &str)], times: &Latency) {
        let extra_labels = Labels::new(labels).0;
        let with = |bound: &str| match extra_labels.is_empty() {
            true => bound.to_owned(),
            false => format!("{extra_labels},{bound}"),
        };
        let mut buckets = times.buckets.iter().peekable();
        let mut below = 0;
        for bound in BOUNDS_NS.map(|bits| 1_u64 << bits) {
            while let Some(bucket) = buckets.next_if(|it| it.below_ns.is_some_and(|it| it <= bound)) {
                below += bucket.count;
            }
            let bound = bound as f64 / 1e9;
            self.line("_bucket", &with(&format!("le=\"{bound}\"")), below);
        }
        let all = below + buckets.map(|bucket| bucket.count).sum::<u64>();
        self.line("_bucket", &with("le=\"+Inf\""), all);
        self.line("_count", &extra_labels, all);
        self.line("_sum", &extra_labels, times.sum_ns as f64 / 1e9);
    }

    fn line(&mut self, suffix: &str, extra_labels: &str, value: impl Display) {
        let comma = if self.labels.is_empty() || extra_labels.is_empty() { "" } else { "," };
        let (name, labels) = (self.name, self.labels);
        let _ = match labels.is_empty() && extra_labels.is_empty() {
            true => writeln!(self.text, "{name}{suffix} {value}"),
            false => writeln!(self.text, "{name}{suffix}{{{labels}{comma}{extra_labels}}} {value}"),
        };
    }
}

#[cfg(test)]
mod tests {
    use larder_vm::control::state::LatencyBucket;

    use super::super::families::FAMILIES;
    use super::*;

    #[test]
    fn hostile_names_stay_within_their_quotes() {
        assert_eq!(Labels::new(&[("a", "x\"} 1\n\\"), ("b", "")]).0, r#"a="x\"} 1\n\\",b="""#);
    }

    /// Each observation is counted in exactly one bucket.
    #[test]
    fn histogram_counts_each_time_once() {
        let bucket = |below_ns, count| LatencyBucket { below_ns, count };
        let times = Latency {
            count: 21,
            sum_ns: 1_500_000_000,
            max_ns: 90_000_000_000,
            buckets: vec![
                bucket(Some(256), 1),
                bucket(Some(8192), 2),
                bucket(Some(10240), 4),
                bucket(Some(1 << 33), 6),
                bucket(None, 8),
            ],
        };
        let family = FAMILIES.iter().find(|family| family.kind == MetricKind::Histogram).expect("one");
        let mut writer = ExpositionWriter::new(ExpositionFormat::OpenMetrics);
        writer.family(family).histogram(&times);
        let text = writer.end();
        for line in [
            "_bucket{le=\"0.000008192\"} 3",
            "_bucket{le=\"0.000016384\"} 7",
            "_bucket{le=\"8.589934592\"} 13",
            "_bucket{le=\"+Inf\"} 21",
            "_count 21",
            "_sum 1.5",
        ] {
            assert!(text.contains(&format!("{}{line}\n", family.name)), "no {line} in {text}");
        }
    }
}
