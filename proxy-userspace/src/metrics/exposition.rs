//! Writes metrics as text: in `OpenMetrics` for scrapers that ask for it, otherwise in Prometheus'
//! own format.

use std::fmt::{self, Write as _};

use prometheus_client::{encoding::text, registry::Registry};

const OPENMETRICS: &str = "application/openmetrics-text";

/// All metrics of the process.
#[derive(Debug)]
pub struct Exposition(pub(super) Registry);

impl Exposition {
    /// Returns the content type and the text for a scraper that sends this `Accept` header.
    pub fn encode(&self, accept: Option<&str>) -> Result<(&'static str, String), fmt::Error> {
        let mut openmetrics = String::new();
        text::encode(&mut openmetrics, &self.0)?;
        if accept.is_some_and(|accept| accept.contains(OPENMETRICS)) {
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
