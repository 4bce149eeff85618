//! Pictures of the dashboards for the documents: their panels, drawn from what Prometheus answered
//! to their queries.

mod draw;
mod recording;
mod units;

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use xtask::workspace;

use self::recording::Recording;
use super::source::Source;

/// Draws each dashboard into `docs/dashboards`, from this recording.
pub(super) fn draw_all(source: &Source, recording: &Path) -> Result<()> {
    let text =
        fs::read_to_string(recording).with_context(|| format!("cannot read {}", recording.display()))?;
    let recording: Recording = serde_json::from_str(&text)
        .with_context(|| format!("{} is not what daemon --record writes", recording.display()))?;
    let folder = workspace::root().join("docs/dashboards");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    for dashboard in &source.dashboards {
        let path = folder.join(format!("{}.svg", dashboard.name));
        fs::write(&path, draw::draw(dashboard, &recording)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
        println!("{}", path.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn picture_has_the_titles_and_names_of_its_panels() {
        let source: Source = serde_yaml_ng::from_str(
            "{variables: {}, dashboards: [{name: d, title: D, select: '', variables: [], rows: [\
             {title: A row, panels: [{title: Graph, queries: {'{{map}}': q}}, \
             {title: Number, show: stat, unit: s, queries: {'': q}}, \
             {title: Words, show: table, queries: {'': q}}, {title: Nothing, queries: {'': q}}]}]}]}",
        )
        .unwrap();
        let series = r#"[{"labels": {"map": "flows"}, "points": [[10, 1.0], [12, 0.5]]}]"#;
        let query =
            |title, legend| format!(r#"{{"panel": "d: {title}", "legend": "{legend}", "series": {series}}}"#);
        let queries = [query("Graph", "{{map}}"), query("Number", ""), query("Words", "")].join(", ");
        let recording: Recording = serde_json::from_str(&format!("{{\"queries\": [{queries}]}}")).unwrap();
        let svg = draw::draw(&source.dashboards[0], &recording).unwrap();
        for text in ["A row", "Graph", "\nflows\n", "\n500 ms\n", "map: flows", "Nothing"] {
            assert!(svg.contains(text), "{text} is not in {svg}");
        }
    }

    #[test]
    fn every_dashboard_has_a_picture_of_its_panels() {
        let source = super::super::source().unwrap();
        for dashboard in &source.dashboards {
            let path = workspace::root().join(format!("docs/dashboards/{}.svg", dashboard.name));
            let svg = fs::read_to_string(&path).unwrap_or_default();
            let panels = dashboard.rows.iter().flat_map(|row| &row.panels);
            for title in panels.map(|panel| &panel.title) {
                assert!(svg.contains(&**title), "{}: {title}: draw it again", path.display());
            }
        }
    }
}
