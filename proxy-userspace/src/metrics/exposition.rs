//! Writes metrics in the format that the scraper prefers: protobuf, `OpenMetrics`, or Prometheus'
//! own text.

use std::fmt::{self, Write as _};

#[cfg(feature = "protobuf-metrics")]
use prometheus_client::encoding::prometheus_protobuf::{self, EncodeError};
use prometheus_client::{encoding::text, registry::Registry};

/// Why metrics cannot be written.
#[cfg(not(feature = "protobuf-metrics"))]
type EncodeError = fmt::Error;

const OPENMETRICS: &str = "application/openmetrics-text";
const PROTOBUF: &str =
    "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited";

/// The format of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Text,
    OpenMetrics,
    Protobuf,
}

impl Format {
    /// Returns the format that a scraper with this header `Accept` prefers.
    fn preferred(accept: &str) -> Self {
        let known = accept.split(',').filter_map(|range| Some((Self::of_range(range)?, quality(range))));
        // The first one of the highest quality.
        let best = known.reduce(|best, next| if next.1 > best.1 { next } else { best });
        best.map_or(Self::Text, |(format, _)| format)
    }

    fn of_range(range: &str) -> Option<Self> {
        let mut parts = PROTOBUF.split("; ");
        match range.split(';').next()?.trim() {
            OPENMETRICS => Some(Self::OpenMetrics),
            "text/plain" | "text/*" | "*/*" => Some(Self::Text),
            _ => {
                let is_protobuf = parts.all(|part| range.split(';').any(|given| given.trim() == part));
                (cfg!(feature = "protobuf-metrics") && is_protobuf).then_some(Self::Protobuf)
            }
        }
    }
}

fn quality(range: &str) -> f32 {
    let quality = range.split(';').find_map(|part| part.trim().strip_prefix("q="));
    quality.map_or(1.0, |quality| quality.parse().unwrap_or_default())
}

/// All metrics of the process.
#[derive(Debug)]
pub struct Exposition(pub(super) Registry);

impl Exposition {
    /// Returns the content type and the body for a scraper that sends this `Accept` header.
    pub fn answer(&self, accept: Option<&str>) -> Result<(&'static str, Vec<u8>), EncodeError> {
        #[cfg(feature = "protobuf-metrics")]
        if Format::preferred(accept.unwrap_or_default()) == Format::Protobuf {
            return Ok((PROTOBUF, prometheus_protobuf::encode_to_vec(&self.0)?));
        }
        let (content_type, text) = self.encode(accept)?;
        Ok((content_type, text.into()))
    }

    /// Returns the content type and the text for a scraper that sends this `Accept` header.
    pub fn encode(&self, accept: Option<&str>) -> Result<(&'static str, String), fmt::Error> {
        let mut openmetrics = String::new();
        text::encode(&mut openmetrics, &self.0)?;
        if Format::preferred(accept.unwrap_or_default()) == Format::OpenMetrics {
            return Ok(("application/openmetrics-text; version=1.0.0; charset=utf-8", openmetrics));
        }
        Ok(("text/plain; version=0.0.4; charset=utf-8", to_prometheus(&openmetrics)?))
    }
}

/// Converts `OpenMetrics` text to Prometheus' format.
///
/// The formats differ in the comments: Prometheus' format has the full name of a counter there, and
/// no end mark and no units. Bucket bounds that are whole numbers are written without a fraction,
/// as upstream writes them: queries compare bounds as text.
fn to_prometheus(openmetrics: &str) -> Result<String, fmt::Error> {
    let mut out = String::with_capacity(openmetrics.len() + 256);
    let mut help = None;
    for line in openmetrics.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ');
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            let suffix = if kind == "counter" { "_total" } else { "" };
            if let Some((_, text)) = help.take() {
                writeln!(out, "# HELP {name}{suffix} {text}")?;
            }
            writeln!(out, "# TYPE {name}{suffix} {kind}")?;
        } else if !line.starts_with('#') {
            writeln!(out, "{}", with_go_bound(line).as_deref().unwrap_or(line))?;
        }
    }
    Ok(out)
}

/// Writes the bucket bound of a sample line as Go writes numbers, if it is a whole number.
fn with_go_bound(line: &str) -> Option<String> {
    let (name, rest) = line.split_once("{le=\"")?;
    let (bound, rest) = rest.split_once(".0\"")?;
    let is_whole = bound.bytes().all(|byte| byte.is_ascii_digit());
    is_whole.then(|| format!("{name}{{le=\"{bound}\"{rest}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_format_is_that_of_the_highest_quality() {
        // Of Prometheus 3, with and without native histograms.
        const TEXTS: &str = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,\
                             application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        const DELIMITED: &str =
            "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited";
        let native = format!("{DELIMITED};q=0.6,{TEXTS}");
        for (accept, format) in [
            ("", Format::Text),
            ("*/*", Format::Text),
            ("text/html", Format::Text),
            (
                "application/vnd.google.protobuf;proto=another;encoding=delimited,text/plain;q=0.1",
                Format::Text,
            ),
            (TEXTS, Format::OpenMetrics),
            (&native, Format::Protobuf),
            (&native.replace("q=0.6", "q=0.45"), Format::OpenMetrics),
        ] {
            assert_eq!(Format::preferred(accept), format, "{accept}");
        }
    }
}
