//! Answers of the running server in protobuf: lists, watches, errors and faults.

use std::{io::Read as _, time::Duration};

use anyhow::{Context as _, Result};
use flate2::read::MultiGzDecoder;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

use super::decoder::{events, numbers, texts, unwrapped, values};
use crate::apiserver::{
    ApiServer, Encoding, Fault, Interruption, KubernetesVersion, Request, Resource, Verb,
};

const DEADLINE: Duration = Duration::from_secs(20);
const PROTOBUF: &str = "Accept: application/vnd.kubernetes.protobuf, application/json\r\n";
const SERVICES: &str = "/api/v1/services";
/// A streaming list that ends as soon as its objects are sent.
const STREAMING_LIST: &str = "/api/v1/services?watch=true&sendInitialEvents=true&\
                              resourceVersionMatch=NotOlderThan&timeoutSeconds=0";

/// An answer, up to its end.
struct Answer {
    head: String,
    body: Vec<u8>,
}

impl Answer {
    fn has_type(&self, content_type: &str) -> bool {
        self.head.contains(&format!("content-type: {content_type}\r\n"))
    }

    fn has_status(&self, code: u16) -> bool {
        self.head.lines().next().is_some_and(|line| line.contains(&format!(" {code} ")))
    }
}

async fn server_with(services: &[&str]) -> Result<ApiServer> {
    let server = ApiServer::start("127.0.0.1:0".parse()?).await?;
    services.iter().try_for_each(|name| server.put(service(name)).map(drop))?;
    Ok(server)
}

fn service(name: &str) -> Value {
    json!({"kind": "Service", "apiVersion": "v1", "metadata": {"name": name},
        "spec": {"clusterIP": "10.96.0.10", "ports": [{"port": 80}]}})
}

/// Sends a request with these lines of headers.
async fn get(server: &ApiServer, path: &str, headers: &str) -> Result<Answer> {
    let read = async {
        let mut stream = TcpStream::connect(server.address()).await?;
        // With HTTP/1.0 the body is not chunked, and ends with the connection.
        stream.write_all(format!("GET {path} HTTP/1.0\r\n{headers}\r\n").as_bytes()).await?;
        let mut all = Vec::new();
        // A fault may reset the connection.
        let _ = stream.read_to_end(&mut all).await;
        let end = all.windows(4).position(|part| part == b"\r\n\r\n").context("a head")? + 4;
        let body = all.split_off(end);
        anyhow::Ok(Answer { head: String::from_utf8(all)?, body })
    };
    timeout(DEADLINE, read).await.with_context(|| path.to_owned())?
}

#[tokio::test]
async fn a_list_has_the_encoding_that_the_client_prefers() -> Result<()> {
    let server = server_with(&["a", "b"]).await?;
    let answer = get(&server, &format!("{SERVICES}?limit=1"), PROTOBUF).await?;
    assert!(answer.has_type("application/vnd.kubernetes.protobuf"), "{}", answer.head);
    let (type_meta, list) = unwrapped(&answer.body)?;
    assert_eq!(type_meta, ["v1", "ServiceList"]);
    assert_eq!(texts(list, &[1, 2])?, ["3"]);
    assert_eq!(texts(list, &[1, 3])?.len(), 1, "a continue token");
    assert_eq!(numbers(list, &[1, 4])?, [1], "remaining");
    assert_eq!(texts(list, &[2, 1, 1])?, ["a"]);
    assert_eq!(numbers(list, &[2, 2, 1, 3])?, [80]);
    let answer =
        get(&server, SERVICES, "Accept: application/json, application/vnd.kubernetes.protobuf\r\n").await?;
    assert!(answer.has_type("application/json"), "{}", answer.head);
    let list: Value = serde_json::from_slice(&answer.body)?;
    assert_eq!(list["items"][1]["metadata"]["name"], "b");
    let encodings: Vec<_> = server.requests().iter().map(Request::encoding).collect();
    assert_eq!(encodings, [Encoding::Protobuf, Encoding::Json]);
    Ok(())
}

#[tokio::test]
async fn each_resource_has_an_empty_list_and_a_bookmark_in_protobuf() -> Result<()> {
    let server = server_with(&[]).await?;
    for resource in &Resource::ALL {
        let answer = get(&server, &resource.path(), PROTOBUF).await?;
        let (type_meta, list) = unwrapped(&answer.body)?;
        assert_eq!(type_meta, [resource.api_version(), format!("{}List", resource.kind)]);
        assert_eq!(values(list, &[2])?, []);
        let path = STREAMING_LIST.replace(SERVICES, &resource.path());
        let answer = get(&server, &path, PROTOBUF).await?;
        let [("BOOKMARK", bookmark)] = events(&answer.body)?[..] else { panic!("{:?}", answer.body) };
        let (type_meta, bookmark) = unwrapped(bookmark)?;
        assert_eq!(type_meta, [&*resource.api_version(), resource.kind]);
        assert_eq!(texts(bookmark, &[1, 12, 1])?, ["k8s.io/initial-events-end"]);
    }
    Ok(())
}

#[tokio::test]
async fn one_object_has_the_encoding_that_the_client_prefers() -> Result<()> {
    let server = server_with(&["a"]).await?;
    let answer = get(&server, "/api/v1/namespaces/default/services/a", PROTOBUF).await?;
    let (type_meta, object) = unwrapped(&answer.body)?;
    assert_eq!((type_meta, texts(object, &[1, 1])?), (["v1", "Service"], vec!["a"]));
    Ok(())
}

#[tokio::test]
async fn a_long_list_is_compressed() -> Result<()> {
    let server = server_with(&[]).await?;
    (0..1200).try_for_each(|number| server.put(service(&format!("s{number:04}"))).map(drop))?;
    let plain = get(&server, SERVICES, PROTOBUF).await?;
    assert!(plain.body.len() > 128 << 10, "{}", plain.body.len());
    let answer = get(&server, SERVICES, &format!("{PROTOBUF}Accept-Encoding: gzip\r\n")).await?;
    assert!(answer.head.contains("content-encoding: gzip\r\n"), "{}", answer.head);
    let mut list = Vec::new();
    MultiGzDecoder::new(&*answer.body).read_to_end(&mut list)?;
    assert_eq!(list, plain.body);
    Ok(())
}

#[tokio::test]
async fn a_streaming_list_has_a_frame_for_each_event() -> Result<()> {
    let server = server_with(&["a", "b"]).await?;
    server.speak_as(KubernetesVersion(37));
    let plain = get(&server, STREAMING_LIST, PROTOBUF).await?;
    assert!(plain.has_type("application/vnd.kubernetes.protobuf;stream=watch"), "{}", plain.head);
    let all = events(&plain.body)?;
    assert_eq!(all.iter().map(|(event, _)| *event).collect::<Vec<_>>(), ["ADDED", "ADDED", "BOOKMARK"]);
    let (type_meta, object) = unwrapped(all[1].1)?;
    assert_eq!((type_meta, texts(object, &[1, 1])?), (["v1", "Service"], vec!["b"]));
    let answer = get(&server, STREAMING_LIST, &format!("{PROTOBUF}Accept-Encoding: gzip\r\n")).await?;
    let mut stream = Vec::new();
    MultiGzDecoder::new(&*answer.body).read_to_end(&mut stream)?;
    assert_eq!(stream, plain.body);
    Ok(())
}

#[tokio::test]
async fn changes_have_the_version_of_the_change() -> Result<()> {
    let server = server_with(&["a", "b"]).await?;
    server.put(service("a"))?;
    server.delete("Service", "default", "b")?;
    let answer =
        get(&server, &format!("{SERVICES}?watch=1&resourceVersion=2&timeoutSeconds=0"), PROTOBUF).await?;
    let mut found = Vec::new();
    for (event, object) in events(&answer.body)? {
        let (_, object) = unwrapped(object)?;
        found.push((event, texts(object, &[1, 1])?.concat(), texts(object, &[1, 6])?.concat()));
    }
    let expected = [("ADDED", "b", "3"), ("MODIFIED", "a", "4"), ("DELETED", "b", "5")];
    assert_eq!(found, expected.map(|(event, name, version)| (event, name.to_owned(), version.to_owned())));
    Ok(())
}

#[tokio::test]
async fn errors_are_statuses_in_protobuf() -> Result<()> {
    let server = server_with(&[]).await?;
    server.inject_fault(None, None, Fault::Forbidden, 1);
    let answer = get(&server, SERVICES, PROTOBUF).await?;
    assert!(
        answer.has_status(403) && answer.has_type("application/vnd.kubernetes.protobuf"),
        "{}",
        answer.head
    );
    let (type_meta, status) = unwrapped(&answer.body)?;
    assert_eq!((type_meta, numbers(status, &[6])?), (["v1", "Status"], vec![403]));
    assert_eq!(texts(status, &[5, 3])?, ["services"]);
    server.inject_fault(None, Some(Verb::Watch), Fault::ExpiredInStream, 1);
    let answer = get(&server, &format!("{SERVICES}?watch=1"), PROTOBUF).await?;
    let [("ERROR", status)] = events(&answer.body)?[..] else { panic!("{:?}", answer.body) };
    let (type_meta, status) = unwrapped(status)?;
    assert_eq!((type_meta, numbers(status, &[6])?), (["v1", "Status"], vec![410]));
    let answer = get(&server, "/apis/unknown/v1/things", PROTOBUF).await?;
    assert!(answer.has_status(404), "{}", answer.head);
    assert_eq!(numbers(unwrapped(&answer.body)?.1, &[6])?, [404]);
    Ok(())
}

#[tokio::test]
async fn a_client_that_accepts_no_encoding_of_the_server_is_refused_in_json() -> Result<()> {
    let server = server_with(&[]).await?;
    let answer = get(&server, SERVICES, "Accept: application/cbor\r\n").await?;
    assert!(answer.has_status(406) && answer.has_type("application/json"), "{}", answer.head);
    assert_eq!(serde_json::from_slice::<Value>(&answer.body)?["reason"], "NotAcceptable");
    Ok(())
}

#[tokio::test]
async fn a_connection_breaks_in_the_middle_of_a_list() -> Result<()> {
    let server = server_with(&["a"]).await?;
    for (headers, start) in [(PROTOBUF, &b"k8s\0\x0a"[..]), ("", b"{\"")] {
        server.inject_fault(None, None, Fault::BreakMidBody, 1);
        let answer = get(&server, SERVICES, headers).await?;
        assert!(answer.has_status(200) && answer.body.starts_with(start), "{:?}", answer.body);
        assert!(unwrapped(&answer.body).is_err() && serde_json::from_slice::<Value>(&answer.body).is_err());
    }
    Ok(())
}

#[tokio::test]
async fn a_connection_breaks_in_the_middle_of_an_event() -> Result<()> {
    let server = server_with(&["a"]).await?;
    server.inject_fault(None, None, Fault::BreakMidBody, 1);
    let answer = get(&server, &format!("{SERVICES}?watch=1"), PROTOBUF).await?;
    let (length, part) = answer.body.split_first_chunk().context("a length")?;
    let length = usize::try_from(u32::from_be_bytes(*length))?;
    assert!(!part.is_empty() && part.len() < length, "{} of {length}", part.len());
    let path = format!("{SERVICES}?watch=1");
    let watching = get(&server, &path, PROTOBUF);
    let interrupting = async {
        while server.requests().len() < 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // The first event is sent after the watch has subscribed.
        tokio::time::sleep(Duration::from_millis(100)).await;
        server.interrupt(Interruption::BreakMidEvent);
    };
    let (answer, ()) = tokio::join!(watching, interrupting);
    assert!(events(&answer?.body).is_err());
    Ok(())
}

#[tokio::test]
async fn a_body_that_is_no_list_has_the_content_type_of_the_encoding() -> Result<()> {
    let server = server_with(&[]).await?;
    for (headers, content_type) in
        [(PROTOBUF, "application/vnd.kubernetes.protobuf"), ("", "application/json")]
    {
        server.inject_fault(None, None, Fault::NotJson, 1);
        let answer = get(&server, SERVICES, headers).await?;
        assert!(answer.has_type(content_type) && answer.body.starts_with(b"<html>"), "{}", answer.head);
    }
    Ok(())
}

#[tokio::test]
async fn an_object_that_has_no_encoding_is_an_internal_error() -> Result<()> {
    let server = server_with(&["a"]).await?;
    let mut odd = service("odd");
    odd["spec"]["colour"] = json!("red");
    server.put(odd)?;
    let answer = get(&server, SERVICES, PROTOBUF).await?;
    assert!(answer.has_status(500), "{}", answer.head);
    let message = "cannot encode the Service \"odd\": spec: the table has no field colour";
    assert_eq!(serde_json::from_slice::<Value>(&answer.body)?["message"], message);
    let answer = get(&server, STREAMING_LIST, PROTOBUF).await?;
    let [("ADDED", _), ("ERROR", status)] = events(&answer.body)?[..] else { panic!("{:?}", answer.body) };
    assert_eq!(texts(unwrapped(status)?.1, &[3])?, [message]);
    let answer = get(&server, SERVICES, "").await?;
    assert_eq!(serde_json::from_slice::<Value>(&answer.body)?["items"][1]["spec"]["colour"], "red");
    Ok(())
}
