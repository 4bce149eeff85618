//! A scenario of `shunt top`: one reading, and the live table in a pseudo terminal.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use shunt_tests::{
    agent::protocol::{ConnectRequest, Protocol},
    small_cluster::NODE_PORT,
    world::Host,
};

use super::test_node::{Setup, TestNode};

const TIMEOUT: Duration = Duration::from_secs(30);
/// Connections while nobody measures programs.
const UNMEASURED: usize = 200;
/// Leaves the alternate screen, and shows the cursor: the last that a restored terminal gets.
const RESTORED: &str = "\u{1b}[?1049l";

pub(crate) fn top_shows_what_happens_and_gives_the_terminal_back(setup: &Setup) -> Result<()> {
    let mut node = TestNode::new(setup, &setup.mode, "{}")?;
    let shunt = setup.shunt.display().to_string();
    let text = node.world.run(Host::Node1, &format!("{shunt} top --once 2>&1 || true"))?;
    ensure!(text.contains("no shunt runs in this network namespace"), "{text}");
    node.proxy.start(&mut node.world)?;
    node.wait_until_served(&[Host::A1, Host::A2], TIMEOUT)?;
    let text = node.world.run(Host::Node1, &format!("{shunt} top </dev/null 2>&1 || echo code $?"))?;
    ensure!(text.contains("needs a terminal") && text.contains("code 2"), "{text}");
    endpoints_have_open_flows(&mut node, &shunt)?;
    the_terminal_is_restored(setup, &node, &shunt)?;
    let mut measured = Vec::new();
    // The agents of the pods end with the load.
    node.under_load(|node| {
        services_have_rates(setup, node, &shunt)?;
        if setup.mode == "ebpf" {
            measured = programs(node, &shunt, "1s")?;
        }
        Ok(())
    })?;
    if setup.mode == "ebpf" {
        let has_cost = |program: &Value| program["cpuPercent"].as_f64().is_some_and(|share| share > 0.0);
        ensure!(measured.iter().any(has_cost), "{measured:?}");
        nothing_is_measured_now(&mut node, &shunt)?;
        let maps = read(&node, &shunt, "maps --once")?;
        let services = maps.iter().find(|map| map["name"] == "services").context("no map services")?;
        ensure!(services["entries"].as_u64() > Some(0), "{services}");
    } else {
        let text = node.world.run(Host::Node1, &format!("{shunt} top maps --once 2>&1 || true"))?;
        ensure!(text.contains("only the ebpf mode has them"), "{text}");
    }
    node.end()
}

/// Returns the items of a list in JSON.
fn read(node: &TestNode, shunt: &str, arguments: &str) -> Result<Vec<Value>> {
    let text = node.world.run(Host::Node1, &format!("{shunt} top {arguments} -o json"))?;
    let list: Value = serde_json::from_str(&text).with_context(|| text.clone())?;
    ensure!(list["apiVersion"] == "shunt.dev/v1alpha1", "{text}");
    list["items"].as_array().cloned().with_context(|| text)
}

fn services_have_rates(setup: &Setup, node: &TestNode, shunt: &str) -> Result<()> {
    let services = read(node, shunt, "--once --interval 1s")?;
    let web = services.iter().find(|service| service["name"] == "web").context("no Service web")?;
    let rate = web["perSecond"]["connections"].as_f64();
    let is_counted = ["ebpf", "ipvs"].contains(&&*setup.mode);
    ensure!(rate.is_some_and(|rate| rate > 0.0) == is_counted, "{web}");
    ensure!(web["eligibleEndpoints"] == 2 && web["totalEndpoints"] == 2, "{web}");
    let text = node.world.run(Host::Node1, &format!("{shunt} top --once --interval 1s --filter web"))?;
    ensure!(text.contains("CONN/S") && text.contains("2/2") && !text.contains("dns"), "{text}");
    Ok(())
}

/// A client outside keeps a connection to the node port open.
fn endpoints_have_open_flows(node: &mut TestNode, shunt: &str) -> Result<()> {
    let request = ConnectRequest::new(NODE_PORT.parse()?, Protocol::Tcp, 1).with_timeout(TIMEOUT);
    node.world.agent(Host::Client)?.open("kept", request)?;
    let endpoints = read(node, shunt, "endpoints web --once")?;
    let flows: u64 = endpoints.iter().filter_map(|endpoint| endpoint["flows"].as_u64()).sum();
    ensure!(endpoints.len() == 2 && flows == 1, "{endpoints:?}");
    let text = node.world.run(Host::Node1, &format!("{shunt} top endpoints nothing --once 2>&1 || true"))?;
    ensure!(text.contains("no Service default/nothing"), "{text}");
    Ok(())
}

fn programs(node: &TestNode, shunt: &str, interval: &str) -> Result<Vec<Value>> {
    read(node, shunt, &format!("programs --once --interval {interval}"))
}

/// Packets come in while no command runs. Other tests may have programs of the same names, with
/// packets of their own.
fn nothing_is_measured_now(node: &mut TestNode, shunt: &str) -> Result<()> {
    // Without load, nothing runs between the last reading of the command and its end.
    let before = programs(node, shunt, "200ms")?;
    let own = attached_programs(node)?;
    let request = ConnectRequest::new(NODE_PORT.parse()?, Protocol::Tcp, UNMEASURED).with_timeout(TIMEOUT);
    node.world.agent(Host::Client)?.connect(request)?;
    let after = programs(node, shunt, "200ms")?;
    let runs = |programs: &[Value]| -> u64 {
        let own = programs.iter().filter(|program| own.contains(&program["id"]));
        own.filter_map(|program| program["runs"].as_u64()).sum()
    };
    ensure!(runs(&after) > 0, "none of {own:?} is among {after:?}");
    let grown = runs(&after).saturating_sub(runs(&before));
    ensure!(grown < UNMEASURED as u64, "{grown} runs were counted while nobody measured: {after:?}");
    Ok(())
}

/// Returns the ids of the programs that this node's shunt attached.
fn attached_programs(node: &TestNode) -> Result<Vec<Value>> {
    let pins = node.world.pin_directory().join("links");
    let command = format!("for pin in {}/*; do bpftool -j link show pinned $pin; echo; done", pins.display());
    let output = node.world.run(Host::Node1, &command)?;
    let program = |line: &str| {
        let link: Value = serde_json::from_str(line).with_context(|| line.to_owned())?;
        Ok(link["prog_id"].clone())
    };
    output.lines().filter(|line| !line.is_empty()).map(program).collect()
}

/// Runs the live table in the pseudo terminal of script(1).
fn the_terminal_is_restored(setup: &Setup, node: &TestNode, shunt: &str) -> Result<()> {
    let typescript = node.world.directory().join("typescript");
    let script = |keys: &str, command: &str| {
        let line = format!(
            "{{ {keys}; }} | timeout 60 script --quiet --return --flush --command 'stty rows 30 cols 140; {command}' {} || echo code $?",
            typescript.display()
        );
        let output = node.world.run(Host::Node1, &line)?;
        let text = String::from_utf8_lossy(&std::fs::read(&typescript)?).into_owned();
        anyhow::Ok((output, text))
    };
    let keys = "sleep 3; printf 3; sleep 2; printf '?'; sleep 0.5; printf x; sleep 0.5; printf q; sleep 1";
    let (output, text) = script(keys, &format!("{shunt} top --interval 500ms"))?;
    ensure!(!output.contains("code") && text.contains(RESTORED), "{output}\n{text}");
    ensure!(text.contains("CONN/S") && text.contains("default") && text.contains("Press"), "{text}");
    ensure!(text.contains("NS/RUN") == (setup.mode == "ebpf"), "{text}");
    let ended = format!("timeout --foreground --preserve-status 2 {shunt} top");
    let (output, text) = script("sleep 5", &ended)?;
    ensure!(output.contains("code 143") && text.contains(RESTORED), "{output}\n{text}");
    Ok(())
}
