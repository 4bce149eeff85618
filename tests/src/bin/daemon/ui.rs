//! A scenario of the pages at `/ui/`, in a real browser without a window.

use std::{fmt::Write as _, path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use serde_yaml_ng::Mapping;
use shunt_tests::{deadline::Deadline, world::Host};

use super::{
    browser::Browser,
    test_node::{Setup, TestNode},
};

const TIMEOUT: Duration = Duration::from_secs(30);
const UI: &str = "http://127.0.0.1:10249/ui/";
/// Services besides the two of the small cluster: with them, the list has a second page.
const OTHERS: usize = 120;
const QUESTION: &str = "services/default/web?from=node&client=auto&to=10.96.0.80%3A80%2Ftcp";
/// A blank page is a smaller picture.
const LEAST_PICTURE: usize = 8_000;

/// Each page, and what somebody sees there.
const PAGES: [(&str, &[&str]); 9] = [
    ("", &["State", "Service ports", "eth0", "Mode"]),
    ("services", &["1 to 100 of 122 service ports", "10.96.0.80:80, *:30080", "default/web", "next"]),
    ("services?search=&page=2", &["101 to 122 of 122 service ports", "more/other-098", "previous"]),
    ("services?search=web", &["1 to 1 of 1 service ports", "default/web", "2/2"]),
    ("services?search=10.96.0.53", &["1 to 1 of 1 service ports", "default/dns"]),
    (
        "services/default/web",
        &["What happens to a connection?", "10.244.1.11:8080", "ready", "10.96.0.80:80/tcp"],
    ),
    (QUESTION, &["Explanation", "translated: one of 2 endpoints", "+ 10.244.1.11:8080"]),
    ("maps", &["Maps"]),
    ("events", &["Starting", "shunt starts in the mode"]),
];

pub(crate) fn pages_work_in_a_browser_with_and_without_scripts(setup: &Setup) -> Result<()> {
    let mut node = TestNode::started(setup, &setup.mode, "{}")?;
    node.cluster.apply_all(&other_services())?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    ensure!(node.page("/ui/")?.status == 404, "the pages are there although nobody turned them on");
    ensure!(!node.page("/statusz")?.body.contains("/ui/"), "/statusz names pages that are not there");
    let fields: Mapping = serde_yaml_ng::from_str("{shunt: {ui: true}}")?;
    node.proxy.configure(&setup.mode, &fields)?;
    let is_on = || (node.page("/ui/services?search=other-119").ok()?.status == 200).then_some(());
    Deadline::after(TIMEOUT).poll(is_on).context("the pages are not there after the file has changed")?;
    ensure!(node.page("/statusz")?.body.contains(" /ui/"), "/statusz does not name the pages");
    let mut browser = Browser::start(&node.world, Host::Node1)?;
    for scripts in [true, false] {
        browser.set_scripts(scripts)?;
        for (path, expected) in PAGES {
            let page = browser.load(&format!("{UI}{path}"))?;
            check(&page, expected, scripts).with_context(|| format!("/ui/{path}, scripts: {scripts}"))?;
        }
        somebody_looks_for_a_service(&mut browser).with_context(|| format!("scripts: {scripts}"))?;
    }
    let maps = browser.load(&format!("{UI}maps"))?;
    let expected = if setup.mode == "ebpf" { "tcp_connections" } else { "has no maps" };
    ensure!(maps.contains(expected), "{maps}");
    for (name, picture) in pictures(&mut browser)? {
        ensure!(picture.len() >= LEAST_PICTURE, "{name}: the picture has only {} bytes", picture.len());
    }
    drop(browser);
    node.end()
}

/// Takes the pictures for the documents.
pub(crate) fn take_pictures(setup: &Setup, directory: &Path) -> Result<()> {
    let mut node = TestNode::started(setup, &setup.mode, "{shunt: {ui: true}}")?;
    node.cluster.apply_all(&other_services())?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    let mut browser = Browser::start(&node.world, Host::Node1)?;
    for (name, picture) in pictures(&mut browser)? {
        std::fs::write(directory.join(format!("ui-{name}.png")), picture)?;
    }
    drop(browser);
    node.end()
}

fn other_services() -> String {
    let mut text = String::new();
    for number in 0..OTHERS {
        let address = format!("10.96.7.{}", number + 1);
        let _infallible = write!(
            text,
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: other-{number:03}, namespace: more}}\n\
             spec: {{clusterIP: {address}, ports: [{{port: 80}}]}}\n"
        );
    }
    text
}

fn check(page: &str, expected: &[&str], scripts: bool) -> Result<()> {
    let missing = expected.iter().find(|text| !page.contains(**text));
    ensure!(missing.is_none(), "no {missing:?} in {page}");
    // Only the script shows the box that reloads the page.
    let is_hidden = page.contains("<label id=\"refresh\" hidden=\"\">");
    ensure!(is_hidden != scripts, "the box for reloading: {page}");
    Ok(())
}

/// From the first page to the explanation of a connection, by fields and links only.
fn somebody_looks_for_a_service(browser: &mut Browser) -> Result<()> {
    browser.load(UI)?;
    browser.click("nav a[href='services']")?;
    browser.write_into("input[name=search]", "we")?;
    let found = browser.click("form button")?;
    ensure!(found.contains("1 to 1 of 1 service ports"), "{found}");
    browser.click("tbody a")?;
    let explained = browser.click("form button")?;
    ensure!(explained.contains("translated: one of 2 endpoints"), "{explained}");
    browser.write_into("input[name=from]", "web-0 ")?;
    let refused = browser.click("form button")?;
    ensure!(refused.contains("must be node, the address of the client, or a pod"), "{refused}");
    let node = browser.click("nav a")?;
    ensure!(node.contains("<h1>Node</h1>"), "{node}");
    Ok(())
}

/// Takes a picture of some pages, in light or dark colours.
fn pictures(browser: &mut Browser) -> Result<Vec<(&'static str, Vec<u8>)>> {
    let pages = [
        ("node", "", false),
        ("services", "services", true),
        ("service", QUESTION, false),
        ("maps", "maps", false),
    ];
    let mut pictures = Vec::new();
    for (name, path, dark) in pages {
        browser.set_dark(dark)?;
        browser.load(&format!("{UI}{path}"))?;
        pictures.push((name, browser.picture()?));
    }
    Ok(pictures)
}
