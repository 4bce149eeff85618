//! The API server of the tests gives the answers that a kube-apiserver 1.36 gave in the recordings.

use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use shunt_tests::apiserver::{ApiServer, Fault, Resource};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    time::timeout,
};

const DEADLINE: Duration = Duration::from_mins(1);
const DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/apiserver/recordings");

fn text(name: &str) -> Result<String> {
    std::fs::read_to_string(format!("{DIR}/{name}")).with_context(|| name.to_owned())
}

fn recorded(name: &str) -> Result<Value> {
    Ok(serde_json::from_str(&text(name)?)?)
}

/// Returns the body of a recorded answer.
fn recorded_body(name: &str) -> Result<Value> {
    let text = text(name)?;
    let body = text.get(text.find('{').context("a body")?..).context("a body")?;
    Ok(serde_json::from_str(body)?)
}

async fn empty_server() -> Result<ApiServer> {
    ApiServer::start("127.0.0.1:0".parse()?).await
}

/// Starts a server with a recorded list.
async fn holding(name: &str, resource: &Resource) -> Result<ApiServer> {
    let server = empty_server().await?;
    let list = recorded(name)?;
    for item in list["items"].as_array().context("items")? {
        let mut object = item.clone();
        object["kind"] = json!(resource.kind);
        object["apiVersion"] = json!(resource.api_version());
        server.insert_recorded(object)?;
    }
    let version = list["metadata"]["resourceVersion"].as_str().context("version")?;
    server.advance_to(version.parse()?);
    Ok(server)
}

fn resource(plural: &str) -> &'static Resource {
    Resource::ALL.iter().find(|resource| resource.plural == plural).expect("a known resource")
}

/// Returns status and body of an answer, up to `lines` lines or its end.
async fn get(server: &ApiServer, path_and_query: &str, lines: usize) -> Result<(u16, String)> {
    let read = async {
        let mut stream = TcpStream::connect(server.address()).await?;
        // With HTTP/1.0 the body is not chunked, and ends with the connection.
        stream.write_all(format!("GET {path_and_query} HTTP/1.0\r\n\r\n").as_bytes()).await?;
        let mut reader = BufReader::new(stream);
        let mut head = String::new();
        reader.read_line(&mut head).await?;
        let status = head.split(' ').nth(1).context("a status")?.parse()?;
        while !matches!(head.as_str(), "\r\n" | "") {
            head.clear();
            reader.read_line(&mut head).await?;
        }
        let mut body = String::new();
        for _ in 0..lines {
            if reader.read_line(&mut body).await? == 0 {
                break;
            }
        }
        anyhow::Ok((status, body))
    };
    timeout(DEADLINE, read).await.with_context(|| path_and_query.to_owned())?
}

async fn get_json(server: &ApiServer, path_and_query: &str) -> Result<(u16, Value)> {
    let (status, body) = get(server, path_and_query, usize::MAX).await?;
    Ok((status, serde_json::from_str(&body)?))
}

#[tokio::test]
async fn lists_are_as_recorded() -> Result<()> {
    for (plural, name) in [
        ("services", "services-list.json"),
        ("endpointslices", "endpointslices-list.json"),
        ("nodes", "node1-list.json"),
        ("servicecidrs", "servicecidrs-list.json"),
    ] {
        let server = holding(name, resource(plural)).await?;
        assert_eq!(get_json(&server, &resource(plural).path()).await?, (200, recorded(name)?), "{name}");
    }
    Ok(())
}

#[tokio::test]
async fn pages_are_as_recorded() -> Result<()> {
    let server = holding("services-list.json", resource("services")).await?;
    server.advance_to(239);
    let (_, first) = get_json(&server, "/api/v1/services?limit=2").await?;
    assert_eq!(first, recorded("services-list-page1.json")?);
    // Later changes do not appear in the following pages.
    let new = json!({"kind": "Service", "apiVersion": "v1", "metadata": {"name": "z"}, "spec": {}});
    server.put(new)?;
    server.delete("Service", "default", "web")?;
    let token = first["metadata"]["continue"].as_str().context("a token")?;
    let second = format!("/api/v1/services?limit=2&continue={token}");
    assert_eq!(get_json(&server, &second).await?, (200, recorded("services-list-page2.json")?));
    server.compact();
    let (status, expired) = get_json(&server, &second).await?;
    assert_eq!((status, &expired["reason"], &expired["code"]), (410, &json!("Expired"), &json!(410)));
    Ok(())
}

/// Watches with `query` from `version` on during the recorded changes, and compares the events with
/// `recorded`.
async fn replay(
    list: &str,
    plural: &str,
    version: u64,
    query: &str,
    recording: &str,
    before: usize,
) -> Result<()> {
    let server = holding(list, resource(plural)).await?;
    server.advance_to(version);
    let lines: Vec<Value> = text(recording)?.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    let path = format!("{}?{query}", resource(plural).path());
    let watching = get(&server, &path, lines.len());
    let changing = async {
        while server.requests().is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        for change in lines.iter().skip(before) {
            let object = &change["object"];
            let metadata = &object["metadata"];
            let version: u64 = metadata["resourceVersion"].as_str().context("version")?.parse()?;
            server.advance_to(version - 1);
            if change["type"] == "DELETED" {
                let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                server.delete(
                    &text(&object["kind"]),
                    &text(&metadata["namespace"]),
                    &text(&metadata["name"]),
                )?;
            } else {
                server.put(object.clone())?;
            }
        }
        anyhow::Ok(())
    };
    let (watched, changed) = tokio::join!(watching, changing);
    changed?;
    let watched: Vec<Value> = watched?.1.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    for (line, recorded) in watched.iter().zip(&lines) {
        assert_eq!(line, recorded);
    }
    assert_eq!(watched.len(), lines.len());
    Ok(())
}

#[tokio::test]
async fn streaming_list_and_its_changes_are_as_recorded() -> Result<()> {
    let query =
        "watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true";
    replay("services-list.json", "services", 239, query, "services-watchlist.jsonl", 5).await
}

#[tokio::test]
async fn watch_from_a_version_is_as_recorded() -> Result<()> {
    let query = "watch=true&resourceVersion=239";
    replay("services-list.json", "services", 239, query, "services-watch.jsonl", 0).await
}

#[tokio::test]
async fn watch_from_forgotten_history_is_refused_as_recorded() -> Result<()> {
    let server = empty_server().await?;
    server.advance_to(262);
    server.compact();
    let answer = get_json(&server, "/api/v1/services?watch=true&resourceVersion=1").await?;
    assert_eq!(answer, (200, recorded_body("watch-too-old.http")?));
    Ok(())
}

#[tokio::test]
async fn refusals_are_as_recorded() -> Result<()> {
    for (name, misbehaviour, code) in
        [("list-forbidden.http", Fault::Forbidden, 403), ("list-unauthorized.http", Fault::Unauthorized, 401)]
    {
        let server = empty_server().await?;
        server.inject_fault(None, None, misbehaviour, 1);
        assert_eq!(get_json(&server, "/api/v1/services").await?, (code, recorded_body(name)?));
    }
    Ok(())
}

#[tokio::test]
async fn watch_ends_after_its_timeout_as_recorded() -> Result<()> {
    let server = holding("services-list.json", resource("services")).await?;
    let changed = text("watch-timeout.http")?.lines().rfind(|line| line.starts_with('{')).map(str::to_owned);
    let changed: Value = serde_json::from_str(&changed.context("a line")?)?;
    server.insert_recorded(changed["object"].clone())?;
    let (status, body) = get(&server, "/api/v1/services?watch=true&timeoutSeconds=1", usize::MAX).await?;
    let values = |text: &str| -> Result<Vec<Value>> {
        let lines = text.lines().filter(|line| line.starts_with('{'));
        lines.map(|line| Ok(serde_json::from_str(line)?)).collect()
    };
    assert_eq!((status, values(&body)?), (200, values(&text("watch-timeout.http")?)?));
    Ok(())
}
