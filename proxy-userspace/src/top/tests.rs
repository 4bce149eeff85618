//! The live table without a daemon and without a terminal.

use std::time::Duration;

use ratatui::{Terminal, backend::TestBackend};

use super::{
    sample::{Counted, KnownPort, program_load, rates, service_rows},
    *,
};
use crate::{
    health::NodeReport,
    inspect::{Counts, NamedPort},
    kernel::bpf::programs::ProgramRuns,
};

fn parse(words: &[&str]) -> Result<TopArguments, String> {
    let matches = command().try_get_matches_from(["top"].iter().chain(words));
    matches.and_then(|matches| TopArguments::read(&matches)).map_err(|error| error.to_string())
}

fn screen(words: &[&str]) -> Screen {
    Screen::new(&parse(words).expect("valid"))
}

fn node(mode: &str) -> NodeReport {
    NodeReport { mode: Some(mode.to_owned()), ..NodeReport::default() }
}

fn counts(connections: u64, refusals: Option<u64>) -> Counts {
    Counts {
        connections,
        refusals,
        drops: refusals.map(|_| 0),
        bytes_to_endpoints: 3000,
        bytes_to_clients: 0,
    }
}

fn service(name: &str, before: u64, now: u64) -> ServiceRate {
    let counted = counts(now, Some(0));
    ServiceRate {
        port: NamedPort {
            namespace: "shop".to_owned(),
            name: name.to_owned(),
            port_name: "http".to_owned(),
            protocol: "TCP".to_owned(),
            family: "IPv4".to_owned(),
        },
        eligible_endpoints: Some(2),
        total_endpoints: Some(3),
        per_second: rates(&counts(before, Some(0)), &counted, Duration::from_secs(2)),
        counts: Some(counted),
    }
}

fn uncounted(name: &str) -> ServiceRate {
    ServiceRate { per_second: None, counts: None, ..service(name, 0, 0) }
}

fn show(screen: &mut Screen, mode: &str, rows: Rows) {
    screen.show(Sample { node: node(mode), rows, has_rates: true });
}

fn services() -> Rows {
    Rows::Services(vec![
        service("api", 0, 20),
        service("cart", 100, 5100),
        uncounted("web"),
        service("quiet", 7, 7),
    ])
}

fn drawn(screen: &mut Screen) -> String {
    let mut terminal = Terminal::new(TestBackend::new(120, 9)).expect("no terminal is needed");
    terminal.draw(|frame| draw(frame, screen)).expect("memory does not fail");
    let lines = terminal.backend().to_string();
    lines.lines().map(|line| line.trim_matches('"').trim_end()).collect::<Vec<_>>().join("\n")
}

fn names(screen: &Screen) -> Vec<&str> {
    let Rows::Services(rows) = &screen.rows else { panic!("{:?}", screen.rows) };
    screen.shown.iter().map(|index| rows[*index].port.name.as_str()).collect()
}

fn press(screen: &mut Screen, keys: &str) {
    for key in keys.chars() {
        assert_eq!(screen.press(Input::Character(key)), Action::Draw, "{key}");
    }
}

#[test]
fn services_are_drawn_with_the_busiest_first() {
    let mut screen = screen(&[]);
    show(&mut screen, "ebpf", services());
    insta::assert_snapshot!(drawn(&mut screen));
}

#[test]
fn counts_that_the_mode_does_not_have_are_dashes() {
    let mut screen = screen(&[]);
    show(&mut screen, "nftables", Rows::Services(vec![uncounted("web")]));
    insta::assert_snapshot!(drawn(&mut screen));
}

#[test]
fn maps_are_drawn_with_the_fullest_first() {
    let mut screen = screen(&["maps"]);
    let map = |name: &str, entries, fill_percent| MapRow {
        name: name.to_owned(),
        entries,
        capacity: 1000,
        fill_percent,
    };
    show(&mut screen, "ebpf", Rows::Maps(vec![map("services", 10, 1.0), map("flows", 990, 99.0)]));
    insta::assert_snapshot!(drawn(&mut screen));
}

#[test]
fn only_maps_whose_fill_is_not_normal_are_marked() {
    let is_marked = |name: &str| {
        let row = MapRow { name: name.to_owned(), entries: 990, capacity: 1000, fill_percent: 99.0 };
        draw::map(&row).1.fg.is_some()
    };
    assert_eq!(["services", "flows", "affinity"].map(is_marked), [true, true, false]);
}

#[test]
fn programs_are_drawn_with_the_most_costly_first() {
    let mut screen = screen(&["programs"]);
    let runs = |id, name: &str, runs, millis| ProgramRuns {
        id,
        name: name.to_owned(),
        runs,
        run_time: Duration::from_millis(millis),
    };
    let load = |before: Option<ProgramRuns>, now| program_load(before.as_ref(), &now, Duration::from_secs(1));
    let rows = vec![
        load(Some(runs(1, "shunt_connect4", 0, 0)), runs(1, "shunt_connect4", 1000, 1)),
        load(Some(runs(2, "shunt_in_eth", 50, 10)), runs(2, "shunt_in_eth", 150_050, 40)),
        load(None, runs(3, "shunt_out_eth", 0, 0)),
    ];
    show(&mut screen, "ebpf", Rows::Programs(rows));
    insta::assert_snapshot!(drawn(&mut screen));
}

#[test]
fn a_key_sorts_by_another_column_and_another_key_reverses_it() {
    let mut screen = screen(&[]);
    show(&mut screen, "ebpf", services());
    assert_eq!(names(&screen), ["cart", "api", "quiet", "web"], "without counts comes last");
    press(&mut screen, "r");
    assert_eq!(names(&screen), ["quiet", "api", "cart", "web"], "also in the other order");
    for _ in 0..4 {
        assert_eq!(screen.press(Input::Left), Action::Draw);
    }
    assert_eq!(names(&screen), ["api", "cart", "quiet", "web"], "texts are sorted upwards");
}

#[test]
fn a_filter_shows_the_rows_that_contain_it_until_escape() {
    let mut screen = screen(&[]);
    show(&mut screen, "ebpf", services());
    press(&mut screen, "/");
    press(&mut screen, "car");
    assert_eq!(names(&screen), ["cart"]);
    assert!(drawn(&mut screen).ends_with("/car_"));
    assert_eq!(screen.press(Input::Backspace), Action::Draw);
    press(&mut screen, "q");
    assert!(names(&screen).is_empty(), "q is part of the filter while somebody writes it");
    assert_eq!(screen.press(Input::Enter), Action::Draw);
    assert_eq!(screen.press(Input::Escape), Action::Draw);
    assert_eq!(names(&screen).len(), 4);
}

#[test]
fn the_chosen_row_stays_chosen_when_it_moves() {
    let mut screen = screen(&[]);
    show(&mut screen, "ebpf", services());
    press(&mut screen, "jj");
    assert_eq!(screen.chosen(), Some(1));
    let busier = Rows::Services(vec![service("api", 0, 90_000), service("cart", 0, 4)]);
    show(&mut screen, "ebpf", busier);
    assert_eq!((screen.chosen(), names(&screen)[0]), (Some(0), "api"));
    assert_eq!(screen.press(Input::Enter), Action::Read);
    let (view, service) = screen.wanted();
    assert_eq!((view, service.expect("a Service").name.as_str()), (View::Endpoints, "api"));
    assert_eq!(screen.press(Input::Escape), Action::Read);
    assert_eq!(screen.wanted(), (View::Services, None));
}

#[test]
fn a_mode_without_maps_and_programs_has_no_such_views() {
    let mut screen = screen(&[]);
    show(&mut screen, "nftables", services());
    for key in ['2', '3'] {
        assert_eq!(screen.press(Input::Character(key)), Action::Draw);
    }
    assert_eq!(screen.press(Input::Tab), Action::Draw);
    assert_eq!(screen.wanted(), (View::Services, None));
}

#[test]
fn a_reading_of_another_view_is_not_shown() {
    let mut screen = screen(&[]);
    show(&mut screen, "ebpf", services());
    assert_eq!(screen.press(Input::Tab), Action::Read);
    show(&mut screen, "ebpf", services());
    assert!(matches!(&screen.rows, Rows::Maps(rows) if rows.is_empty()));
}

#[test]
fn a_pause_ends_with_a_reading() {
    let mut screen = screen(&[]);
    press(&mut screen, " ");
    assert!(screen.is_paused());
    assert_eq!(screen.press(Input::Character('p')), Action::Read);
    assert!(!screen.is_paused());
}

#[test]
fn the_cursor_scrolls_through_30_000_rows() {
    let mut screen = screen(&[]);
    let rows = (0..30_000).map(|number| service(&format!("s{number:05}"), 0, 0)).collect();
    show(&mut screen, "ebpf", Rows::Services(rows));
    assert_eq!(screen.press(Input::End), Action::Draw);
    assert!(drawn(&mut screen).contains("s29999"));
    assert_eq!(screen.press(Input::Home), Action::Draw);
    assert!(drawn(&mut screen).contains("s00000"));
}

#[test]
fn a_screen_of_any_size_can_be_drawn() {
    let mut screen = screen(&[]);
    show(&mut screen, "ebpf", services());
    press(&mut screen, "?");
    for (width, height) in [(1, 1), (3, 2), (10, 40), (500, 3)] {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("no terminal is needed");
        terminal.draw(|frame| draw(frame, &mut screen)).expect("memory does not fail");
    }
}

/// Returns the connections a second, and all connections, of a service port that is not among those
/// that are counted, and how many rows there are.
fn of_unused(others: Option<u64>) -> (Option<f64>, Option<u64>, usize) {
    let port = service("quiet", 0, 0).port;
    let known = [KnownPort { port, eligible_endpoints: 1, total_endpoints: 1 }];
    let counted: Counted = others
        .into_iter()
        .map(|others| (NamedPort::default(), Counts { bytes_to_endpoints: 0, ..counts(others, Some(0)) }))
        .collect();
    let rows = service_rows(&known, Some((Duration::from_secs(1), &counted)), &counted);
    let rate = rows[0].per_second.as_ref().map(|rates| rates.connections);
    (rate, rows[0].counts.as_ref().map(|counts| counts.connections), rows.len())
}

#[test]
fn a_service_port_that_is_not_counted_is_unused_only_if_no_others_are_counted_together() {
    assert_eq!(of_unused(Some(0)), (Some(0.0), Some(0), 1));
    assert_eq!(of_unused(Some(5)), (None, None, 2), "it may be one of the others");
    assert_eq!(of_unused(None), (None, None, 1), "the mode does not count");
}

#[test]
fn sctp_is_not_counted_by_programs() {
    let port = NamedPort { protocol: "SCTP".to_owned(), ..service("sctp", 0, 0).port };
    let known = [KnownPort { port, eligible_endpoints: 1, total_endpoints: 1 }];
    let nothing = |refusals| Counts { bytes_to_endpoints: 0, ..counts(0, refusals) };
    let of = |refusals| {
        let counted = Counted::from([(NamedPort::default(), nothing(refusals))]);
        service_rows(&known, None, &counted)[0].counts.clone()
    };
    assert_eq!(of(Some(0)), None);
    assert_eq!(of(None), Some(nothing(None)), "IPVS counts it");
}

#[test]
fn the_first_use_of_a_service_port_has_a_rate() {
    let port = service("new", 0, 0).port;
    let known = [KnownPort { port: port.clone(), eligible_endpoints: 1, total_endpoints: 1 }];
    let now = Counted::from([(port, counts(8, Some(0)))]);
    let rows = service_rows(&known, Some((Duration::from_secs(2), &Counted::new())), &now);
    assert_eq!(rows[0].per_second.as_ref().map(|rates| rates.connections), Some(4.0));
    assert_eq!(service_rows(&known, None, &now)[0].per_second, None, "there is no reading before");
}

#[test]
fn counts_that_began_again_have_no_rate() {
    let second = Duration::from_secs(1);
    assert_eq!(rates(&counts(9, None), &counts(3, None), second), None);
    let rates = rates(&counts(3, None), &counts(9, None), second).expect("they grew");
    assert_eq!((rates.connections, rates.refusals), (6.0, None));
}

#[test]
fn what_is_wrong_on_the_command_line_is_named() {
    for (words, expected) in [
        (&["endpoints"][..], "endpoints needs the NAME of a Service"),
        (&["services", "web"], "NAME has a meaning only for endpoints"),
        (&["--sort", "SPEED"], "it has NAMESPACE, NAME, PORT"),
        (&["--interval", "0s"], "0s is no interval: must be like 2s, 1m30s or 500ms"),
        (&["--interval", "2"], "2 is no interval"),
        (&["-o", "json"], "--once"),
        (&["pods"], "invalid value 'pods'"),
    ] {
        let error = parse(words).expect_err("wrong");
        assert!(error.contains(expected), "{words:?}: {error}");
    }
    let endpoints = parse(&["endpoints", "shop/web"]).expect("valid").service.expect("a Service");
    assert_eq!((endpoints.namespace.as_str(), endpoints.name.as_str()), ("shop", "web"));
    let sorting = parse(&["--sort", "-conn/s"]).expect("valid").sorting;
    assert_eq!(sorting, Sorting { column: ServiceRate::CONNECTIONS, descending: false });
}
